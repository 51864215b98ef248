"""Messages of a conversation, as OpenAI's clients and those of other local servers write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from s2moe.server.schema.json_value import is_too_deep, refuse
from s2moe.server.schema.sampling import fail
from s2moe.server.schema.text_parts import join_parts

_TEXTS = {"text": "text", "refusal": "refusal"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CALLS = 128
"""Tool calls of one message."""


def _check_role(value: object) -> object:
    if not isinstance(value, str):
        raise fail("a role is a string")
    if value == "function":
        raise fail("role 'function' is not supported; send a message of role tool with its tool_call_id")
    if value not in _ROLES:
        raise fail(f"role {value[:40]!r} is not supported; use one of {', '.join(_ROLES)}")
    return value


def _join_content(value: object) -> object:
    return join_parts(value, _TEXTS)


def _check_arguments(value: object) -> object:
    if not isinstance(value, str):
        raise fail("arguments are a string of JSON")
    if not value or value.isspace():
        return "{}"  # so some clients write a call without arguments
    try:
        arguments = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise fail(f"the arguments of the call are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise fail("the arguments of the call are not a JSON object")
    if is_too_deep(arguments):
        raise fail("the arguments of the call are nested too deeply")
    return value


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1, max_length=256)
    arguments: Annotated[str, BeforeValidator(_check_arguments)] = Field(description="a JSON object, as text")


class ToolCall(BaseModel):
    """A call that the model made."""

    model_config = ConfigDict(strict=True)

    id: str = Field(min_length=1, max_length=256, description="which call a message of role tool answers")
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_wire(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(strict=True)

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_check_role)
    ] = Field(description="developer means system; tool = the result of a call")
    content: Annotated[str | list[TextPart] | None, BeforeValidator(_join_content)] = Field(
        None,
        description="text, text parts, which are joined, or null, which is no text; only messages of the "
        "assistant and of tools may lack it",
    )
    name: str | None = Field(None, description="of the tool, for the role tool; else accepted and ignored")
    tool_calls: list[ToolCall] | None = Field(
        None, max_length=MAX_CALLS, description="calls that the assistant made; null or empty = none"
    )
    tool_call_id: str | None = Field(None, description="for the role tool: the call that it answers")
    reasoning_content: str | None = Field(
        None, description="what the assistant thought; whether the model sees it again is up to its template"
    )
    reasoning: str | None = Field(None, description="same as reasoning_content, which wins over it")
    refusal: str | None = Field(None, description="taken for the content of an assistant that has none")
    function_call: Annotated[Any, refuse("use `tool_calls`")] = Field(None, description="only null")

    @model_validator(mode="after")
    def _check(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise fail(f"a {self.role} message has no tool calls; only the assistant's may")
        if self.role == "tool" and not self.tool_call_id:
            raise fail("a tool message needs the tool_call_id of the call that it answers")
        # Null is how clients write that there is no text. A message that lacks the field may have it under a
        # wrong name; not a tool's, since some clients leave out what is empty.
        if "content" not in self.model_fields_set and self.role not in ("assistant", "tool"):
            raise fail(f"a {self.role} message needs content")
        return self

    @property
    def text(self) -> str | None:
        """The content; None = nothing but tool calls."""
        assert self.content is None or isinstance(self.content, str)
        if self.content is not None:
            return self.content
        return self.refusal or (None if self.tool_calls else "")

    @property
    def n_text_bytes(self) -> int:
        """Of what every template shows to the model: the reasoning of earlier answers mostly is not."""
        calls = [
            part for call in self.tool_calls or () for part in (call.function.name, call.function.arguments)
        ]
        return sum(len(part.encode()) for part in (self.text or "", *calls))

    def to_wire(self, tool_name: str | None = None) -> dict[str, Any]:
        """The message as the engine expects it. `tool_name`: of the function whose result this is."""
        wire: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.role == "tool":
            wire["tool_call_id"] = self.tool_call_id
            if name := self.name or tool_name:
                wire["name"] = name
        if self.role == "assistant":
            if self.tool_calls:
                wire["tool_calls"] = [call.to_wire() for call in self.tool_calls]
            if reasoning := self.reasoning_content or self.reasoning:
                wire["reasoning_content"] = reasoning
        return wire
