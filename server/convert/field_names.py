"""What the fields of a chat request are called in the request that it was made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from s2moe.server.errors import ApiError, ErrorReply

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?")
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(?:\.(\w+))?")
_PLACE = re.compile(r"(?:messages|tools)\[\d+\](?:\.\w+|\[\d+\])*|json_schema\b")
"""With which the engine begins what it says of messages, tools and schemas."""


@dataclass
class MessageOrigin:
    """Where a chat message comes from, such as `input[2]`."""

    message: str
    calls: list[str] = field(default_factory=list)
    """Of each of its tool calls."""


@dataclass(frozen=True)
class FieldNames:
    """Turns names such as `messages[3].tool_calls[0].id` into the client's own."""

    messages: Sequence[MessageOrigin] = ()
    tools: Sequence[str] = ()
    """Of each tool of the chat request, such as `tools[2]`."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Other names, or their beginnings. Of several that fit the longest counts."""
    tool_fields: Mapping[str, str] = field(default_factory=dict)
    """The same for the fields of a tool."""

    def of(self, param: str) -> str:
        """The client's name; `param` itself if it has no other."""
        if (match := _MESSAGE.match(param)) and int(match[1]) < len(self.messages):
            origin = self.messages[int(match[1])]
            if match[2] is not None and int(match[2]) < len(origin.calls):
                return origin.calls[int(match[2])]
            return origin.message
        if (match := _TOOL.match(param)) and int(match[1]) < len(self.tools):
            name, key = self.tools[int(match[1])], match[2]
            return name if key is None else f"{name}.{self.tool_fields.get(key, key)}{param[match.end() :]}"
        for known in sorted(self.fields, key=len, reverse=True):
            if param == known or param.startswith((f"{known}.", f"{known}[")):
                return self.fields[known] + param[len(known) :]
        return param

    def translate(self, error: ApiError) -> ApiError:
        """Makes the error name the client's field, and returns it."""
        error.message = self._renamed(error.message, error.param)
        error.param = None if error.param is None else self.of(error.param)
        return error

    def translate_reply(self, reply: ErrorReply) -> ErrorReply:
        """The same for what goes on the wire."""
        param = reply.error["param"]
        message = self._renamed(reply.error["message"], param)
        name = None if param is None else self.of(param)
        error: dict[str, Any] = {**reply.error, "param": name, "message": message}
        return replace(reply, error=error)

    def _renamed(self, message: str, param: str | None) -> str:
        if (place := _PLACE.match(message)) is not None:
            message = self.of(place[0]) + message[place.end() :]
        if param is None:
            return message
        return message.replace(f"`{param}`", f"`{self.of(param)}`")
