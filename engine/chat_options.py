"""What a request asks of the chat template beside its messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from s2moe.engine.errors import RequestError


@dataclass(frozen=True)
class ChatOptions:
    """`Generate.chat_options_json`, read."""

    values: Mapping[str, Any]
    source: bytes

    @classmethod
    def read(cls, options_json: bytes) -> ChatOptions:
        """Raises RequestError."""
        try:
            values = json.loads(options_json)
        except (ValueError, RecursionError) as error:
            raise RequestError("invalid_value", "the options of the chat template are no JSON") from error
        if not isinstance(values, dict) or "messages" in values:
            raise RequestError("invalid_value", "the options of the chat template are not its options")
        return cls(values, options_json.strip())

    @property
    def has_schema(self) -> bool:
        return self.values.get("json_schema") is not None

    @property
    def is_strict(self) -> bool:
        """Whether a schema that cannot be enforced in full is an error."""
        return self.values.get("strict_schema") is True

    @property
    def has_tools(self) -> bool:
        """Whether there are tools that the model may call."""
        return bool(self.values.get("tools")) and self.values.get("tool_choice") != "none"

    def to_request(self, messages_json: bytes) -> bytes:
        """The request of s2moe_chat_apply()."""
        options = b"," + self.source.removeprefix(b"{") if self.values else b"}"
        return b'{"messages":%b%b' % (messages_json, options)
