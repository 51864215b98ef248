"""Ids of tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Final

import msgspec

from s2moe.engine.messages import ToolCallDelta

_ALPHABET: Final = string.ascii_letters + string.digits
_N_CHARACTERS: Final = 24


class ToolCalls:
    """The calls of one answer: each gets an id, which like its name is told once."""

    def __init__(self) -> None:
        self._indices: set[int] = set()

    @property
    def n_calls(self) -> int:
        return len(self._indices)

    def complete(self, deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
        """`deltas`: pieces as the parser gives them, whose ids may be missing."""
        return [self._complete(delta) for delta in deltas]

    def _complete(self, delta: ToolCallDelta) -> ToolCallDelta:
        if delta.index in self._indices:
            return ToolCallDelta(index=delta.index, arguments=delta.arguments)
        self._indices.add(delta.index)
        return delta if delta.id else msgspec.structs.replace(delta, id=new_id())


def new_id() -> str:
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(_N_CHARACTERS))
