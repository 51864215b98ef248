"""The tool calls of an answer: their ids, and whether they are whole."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from typing import Final

import msgspec

from s2moe.engine.messages import ToolCallDelta

_ALPHABET: Final = string.ascii_letters + string.digits
_N_CHARACTERS: Final = 24
_KEPT: Final = re.compile(r"[\w.:-]{1,128}")
"""What an id that a model wrote may look like: clients send it back."""


class ToolCalls:
    """The calls of one answer: each gets an id, which like its name is told once.

    Where a format has ids, the model writes them, and its template shows them again: such an id is kept,
    unless a call before has it. Clients find calls by their ids.
    """

    def __init__(self, messages_json: bytes = b"[]", *, own_ids: bool = False) -> None:
        """`messages_json`: of the request. `own_ids`: keep no id of the model's."""
        self._messages_json = messages_json
        self._own_ids = own_ids
        self._taken: set[str] | None = None
        """Ids of calls before; None: nobody has asked yet."""
        self._arguments: list[str] = []
        """Of the last call, in pieces."""
        self.n_calls = 0

    @property
    def is_complete(self) -> bool:
        """Whether there are calls, the last of them with whole arguments."""
        try:
            return isinstance(msgspec.json.decode("".join(self._arguments)), dict)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False

    def complete(self, deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
        """`deltas`: pieces as the parser gives them, in order, whose ids may be missing."""
        return [self._complete(delta) for delta in deltas]

    def _complete(self, delta: ToolCallDelta) -> ToolCallDelta:
        if delta.index < self.n_calls:
            self._arguments.append(delta.arguments)
            return ToolCallDelta(index=delta.index, arguments=delta.arguments)
        self.n_calls += 1
        self._arguments = [delta.arguments]
        return delta if self._may_keep(delta.id) else msgspec.structs.replace(delta, id=new_id())

    def _may_keep(self, call_id: str) -> bool:
        if self._own_ids or not _KEPT.fullmatch(call_id):
            return False
        if self._taken is None:
            self._taken = _ids_of(self._messages_json)
        is_new = call_id not in self._taken
        self._taken.add(call_id)
        return is_new


def _ids_of(messages_json: bytes) -> set[str]:
    calls = [call for message in json.loads(messages_json) for call in message.get("tool_calls") or ()]
    return {call["id"] for call in calls if "id" in call}


def new_id() -> str:
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(_N_CHARACTERS))
