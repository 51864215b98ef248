"""Server-sent events, as all streams frame them."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
"""The end of a whole OpenAI stream."""
_json = msgspec.json.Encoder()


def event(value: dict[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + _json.encode(value) + b"\n\n"


def named_event(kind: str, value: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\n" + event(value)
