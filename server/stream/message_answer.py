"""Engine events → Anthropic's message, and the blocks of its content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from s2moe.engine.messages import Finished, Step
from s2moe.server.stream.answer_parts import AnswerParts, Part

SIGNATURE: Final = "unsigned"
"""Of thinking blocks. Nobody looks at it, but clients drop blocks from their history that have none."""
_STOP_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}


def message_of(message_id: str, model: str) -> dict[str, Any]:
    """The message before its first token, without usage."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def usage_of(n_prompt_tokens: int, n_cached_tokens: int, n_output_tokens: int) -> dict[str, int]:
    """Anthropic counts the tokens that were read from the cache apart from the others."""
    return {
        "input_tokens": n_prompt_tokens - n_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached_tokens,
        "output_tokens": n_output_tokens,
    }


def stop_of(event: Finished) -> dict[str, Any]:
    """Why the answer ended."""
    if event.reason == "stop" and event.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": event.stop_string}
    return {"stop_reason": _STOP_REASONS.get(event.reason, "end_turn"), "stop_sequence": None}


def begun_block(part: Part) -> dict[str, Any]:
    """The block as a stream begins it."""
    if part.kind == "call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def block_of(part: Part) -> dict[str, Any]:
    """The whole block."""
    if part.kind == "call":
        return {**begun_block(part), "input": _input_of(part.text)}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    return {"type": "text", "text": part.text}


def _input_of(arguments: str) -> msgspec.Raw:
    """The arguments as they are. An input is an object, so what a limit of tokens cut has no place in it."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    return msgspec.Raw(arguments.encode() if isinstance(value, dict) else b"{}")


class MessageBuilder:
    """An `answering.AnswerBuilder`. `message` is of message_of()."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self._message = message
        self._parts = AnswerParts()
        self._end: dict[str, Any] = {}

    def feed(self, step: Step) -> None:
        self._parts.feed(step)

    def finish_choice(self, event: Finished) -> None:
        self._parts.finish()
        usage = usage_of(event.n_prompt_tokens, event.n_cached_tokens, event.n_completion_tokens)
        self._end = {**stop_of(event), "usage": usage}

    def finish(self) -> dict[str, Any]:
        content = [block_of(part) for part in self._parts.parts]
        return {**self._message, "content": content, **self._end}
