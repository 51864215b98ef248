"""Prompts from a file, one per line (docs/hot-experts.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

ROLES = ("system", "user", "assistant")


class PromptFileError(Exception):
    """The file cannot be used; the message is one line that names file and line, and never has their text."""


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer."""

    place: str
    """`FILE:LINE`, for messages."""
    messages_json: bytes
    """As `Generate.messages_json`."""


def read_prompts(path: Path) -> list[Prompt]:
    """At least one prompt. A line that begins with `{` is JSON, another is a user's message.

    Empty lines are skipped. Raises PromptFileError.
    """
    try:
        with path.open("rb") as file:
            prompts = list(_parse(path, file))
    except OSError as error:
        raise PromptFileError(f"{path} cannot be read: {error.strerror}") from error
    if not prompts:
        raise PromptFileError(f"{path} has no prompts; write one per line")
    return prompts


def _parse(path: Path, lines: Iterator[bytes]) -> Iterator[Prompt]:
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise PromptFileError(f"{place}: not UTF-8 text") from error
        if not text:
            continue
        messages = _messages_of(place, text) if text.startswith("{") else _user(text)
        yield Prompt(place, msgspec.json.encode(messages))


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _messages_of(place: str, text: str) -> list[dict[str, str]]:
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PromptFileError(f"{place}: {error}") from error
    if ("prompt" in document) == ("messages" in document):
        raise PromptFileError(f"{place}: needs either `prompt` or `messages`")
    if "prompt" in document:
        if not isinstance(document["prompt"], str) or not document["prompt"]:
            raise PromptFileError(f"{place}: `prompt` is not a text")
        return _user(document["prompt"])
    messages = document["messages"]
    if not isinstance(messages, list) or not messages:
        raise PromptFileError(f"{place}: `messages` is not a list of messages")
    return [_message_of(f"{place}: `messages[{index}]`", each) for index, each in enumerate(messages)]


def _message_of(place: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise PromptFileError(f"{place} has a role other than {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str):
        raise PromptFileError(f"{place} has no `content` that is a text")
    return {"role": message["role"], "content": message["content"]}
