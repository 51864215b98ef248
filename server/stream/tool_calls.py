"""Pieces of tool calls, put together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from s2moe.engine.messages import ToolCallDelta


class ToolCalls:
    """The calls of one answer. Pieces come in order: those of a call before those of the next one."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, deltas: Iterable[ToolCallDelta]) -> None:
        for delta in deltas:
            if delta.index == len(self._ids):
                self._ids.append(delta.id)
                self._names.append(delta.name)
                self._arguments.append([])
            self._arguments[delta.index].append(delta.arguments)

    @property
    def arguments(self) -> list[str]:
        """Of each call, as the model wrote them; an answer that was cut may have cut the last."""
        return ["".join(pieces) for pieces in self._arguments]

    def whole(self) -> list[dict[str, Any]]:
        """The `tool_calls` of a message."""
        return [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in zip(self._ids, self._names, self.arguments, strict=True)
        ]
