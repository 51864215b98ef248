"""Content that is either a string or a list of typed parts, as one string."""

from __future__ import annotations

from collections.abc import Mapping

from s2moe.server.schema.sampling import fail


def join_parts(value: object, texts: Mapping[str, str], *, separator: str = "") -> object:
    """Joins the texts of a list of parts; strings and None stay as they are. For a BeforeValidator.

    texts      the types of part that are read, each with the name of its field that holds the text
    separator  what goes between two parts

    Raises PydanticCustomError that names the part.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fail("content is a string or a list of parts")
    return separator.join(_text_of(index, part, texts) for index, part in enumerate(value))


def _text_of(index: int, part: object, texts: Mapping[str, str]) -> str:
    if not isinstance(part, dict):
        raise fail(f"part {index} is not an object with a `type`")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise fail(f"part {index} has no `type`")
    key = texts.get(kind)
    if key is None:
        raise fail(unsupported_part(index, kind, texts))
    text = part.get(key)
    if not isinstance(text, str):
        raise fail(f"part {index} has no string `{key}`")
    return text


def unsupported_part(index: int, kind: str, known: Mapping[str, str]) -> str:
    """What to say of a part that cannot be read."""
    reason = "images are not supported, this model reads text only" if "image" in kind else ""
    reason = reason or f"use {', '.join(known)}"
    return f"part {index} of type {kind[:40]!r} is not supported: {reason}"
