"""Chat messages in the making."""

from __future__ import annotations

from typing import Any

from s2moe.server.convert.field_names import MessageOrigin

SEPARATOR = "\n\n"
"""Between two texts that become one message."""


class Conversation:
    """Gathers what protocols with smaller parts say into OpenAI chat messages.

    Neighbouring parts of the assistant become one message, as they came out of one answer, and neighbouring
    system messages too, of which many templates allow only one. `origins` has an entry for each message.

    merge_users  whether neighbouring messages of the user become one
    """

    def __init__(self, *, merge_users: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[MessageOrigin] = []
        self._merge_users = merge_users

    def add_system(self, text: str, origin: str) -> None:
        self._add_text("system", text, origin, merge=True)

    def add_user(self, text: str, origin: str) -> None:
        self._add_text("user", text, origin, merge=self._merge_users)

    def add_reasoning(self, text: str, origin: str) -> None:
        """What the assistant thought; reasoning behind other parts of a message joins that before them."""
        message = self._assistant(origin)
        message["reasoning_content"] = _joined(message.get("reasoning_content"), text)

    def add_answer(self, text: str, origin: str) -> None:
        """What the assistant said."""
        message = self._assistant(origin)
        message["content"] = _joined(message["content"], text)

    def add_call(self, call_id: str, name: str, arguments: str, origin: str) -> None:
        """`arguments` is JSON text."""
        function = {"name": name, "arguments": arguments}
        calls = self._assistant(origin).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        self.origins[-1].calls.append(origin)

    def add_result(self, call_id: str, text: str, origin: str) -> None:
        self._add({"role": "tool", "tool_call_id": call_id, "content": text}, origin)

    def _assistant(self, origin: str) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": None}, origin)
        return self.messages[-1]

    def _add_text(self, role: str, text: str, origin: str, *, merge: bool) -> None:
        if merge and self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] = _joined(self.messages[-1]["content"], text)
        else:
            self._add({"role": role, "content": text}, origin)

    def _add(self, message: dict[str, Any], origin: str) -> None:
        self.messages.append(message)
        self.origins.append(MessageOrigin(origin))


def _joined(before: str | None, text: str) -> str:
    return f"{before}{SEPARATOR}{text}" if before and text else before or text
