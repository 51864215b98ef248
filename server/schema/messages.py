"""`POST /v1/messages` and its `/count_tokens` (Anthropic): every request field declared once.

Unknown fields are ignored; null means absent. The fields of `SamplingFields` that Anthropic does not have
mean the same as in chat completions, and those of `ForeignFormats` are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from s2moe.server.schema.chat import MAX_MESSAGES
from s2moe.server.schema.foreign_formats import ForeignFormats
from s2moe.server.schema.sampling import SamplingFields, TokenLimit, fail
from s2moe.server.schema.text_parts import join_parts, unsupported_part

CUSTOM = "custom"
BLOCK_SEPARATOR = "\n"
"""Between two blocks of text, which Anthropic's protocol keeps apart and a chat template does not."""
_STRICT = ConfigDict(strict=True, hide_input_in_errors=True)
_TEXTS = {"text": "text"}
_NEEDS = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}
_USER_TYPES = ("text", "tool_result")
_ASSISTANT_TYPES = ("text", "tool_use", "thinking", "redacted_thinking")


def _join_text(value: object) -> object:
    return join_parts(value, _TEXTS, separator=BLOCK_SEPARATOR)


def _as_blocks(value: object) -> object:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise fail("content is a string or a list of blocks")
    for index, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in _NEEDS:
            raise fail(unsupported_part(index, kind, dict.fromkeys(_NEEDS, "")))
    return value


def _only_type_of_foreign(value: object) -> object:
    """Tools that Anthropic runs, or whose schema only its models know, are skipped: nothing of them can be
    wrong."""
    kind = value.get("type") if isinstance(value, dict) else None
    return {"type": kind, "name": ""} if isinstance(kind, str) and kind != CUSTOM else value


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class MessageBlock(BaseModel):
    """One block of a message. Images and documents are not supported."""

    model_config = _STRICT

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = Field(None, description="of a text")
    id: str | None = Field(None, description="of a tool_use")
    name: str | None = Field(None, description="of a tool_use")
    input: dict[str, Any] | None = Field(None, description="of a tool_use: the arguments")
    tool_use_id: str | None = Field(None, description="of a tool_result: the id of its tool_use")
    content: Annotated[
        str | None, BeforeValidator(_join_text, json_schema_input_type=str | list[TextBlock] | None)
    ] = Field(None, description="of a tool_result: text, or text blocks, which are joined")
    is_error: bool | None = Field(None, description="of a tool_result")
    thinking: str | None = Field(None, description="of a thinking block; its signature is not looked at")

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> MessageBlock:
        for name in _NEEDS[self.type]:
            if getattr(self, name) is None:
                raise fail(f"a block of type {self.type} needs `{name}`")
        return self


class MessageTurn(BaseModel):
    """One message of the conversation. Neighbours of the same role count as one."""

    model_config = _STRICT

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[MessageBlock],
        FailFast(),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[MessageBlock] | None),
    ] = Field(description="text, or blocks; null is no text")

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> MessageTurn:
        allowed = _ASSISTANT_TYPES if self.role == "assistant" else _USER_TYPES
        for index, block in enumerate(self.content):
            if block.type not in allowed:
                raise fail(f"block {index}: a {block.type} block is not for a message of role {self.role}")
        return self


class MessagesTool(BaseModel):
    """A tool that the client runs. Tools of any other type are skipped: the server cannot run them."""

    model_config = _STRICT

    type: str | None = Field(None, description="custom, or absent")
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(None, description="JSON schema of the input")
    strict: bool | None = Field(None, description="as of a function of chat completions")


class MessagesToolChoice(BaseModel):
    model_config = _STRICT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="required for tool")
    disable_parallel_tool_use: bool | None = Field(None, description="true = at most one call")

    @model_validator(mode="after")
    def _names_a_tool(self) -> MessagesToolChoice:
        if self.type == "tool" and self.name is None:
            raise fail("a tool_choice of type tool needs `name`")
        return self


class Thinking(BaseModel):
    model_config = _STRICT

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(
        None, ge=1, description="accepted; only max_tokens limits how long the model thinks"
    )


class OutputFormat(BaseModel):
    model_config = _STRICT

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = _STRICT

    format: OutputFormat | None = Field(None, description="schema that the answer's text matches")
    effort: str | None = Field(
        None, description="as reasoning_effort of chat completions, which the chat template sees"
    )


class CountTokensRequest(ForeignFormats, SamplingFields):
    """Body of a request for the number of tokens of a prompt."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, hide_input_in_errors=True)
    FORMAT_FIELD: ClassVar[str] = "output_config.format"

    messages: Annotated[list[MessageTurn], FailFast()] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="the conversation so far; a last message of the assistant is continued",
    )
    model: str | None = Field(
        None, description="any name is served by the loaded model, unless the server runs with --strict-model"
    )
    system: Annotated[
        str | None, BeforeValidator(_join_text, json_schema_input_type=str | list[TextBlock] | None)
    ] = Field(None, description="text, or text blocks, which are joined")
    tools: list[Annotated[MessagesTool, BeforeValidator(_only_type_of_foreign)]] | None = Field(
        None, max_length=1024, description="tools that the client runs; others are skipped"
    )
    tool_choice: MessagesToolChoice | None = Field(None, description="whether tools must be used")
    thinking: Thinking | None = Field(
        None, description="absent = disabled; a model that always thinks does so all the same"
    )
    output_config: OutputConfig | None = Field(None, description="form of the answer")
    output_format: OutputFormat | None = Field(None, description="older name of output_config.format")

    @model_validator(mode="after")
    def _has_one_format(self) -> CountTokensRequest:
        if self.output_format is not None and self.output_config and self.output_config.format:
            raise fail("`output_format` is an older name of `output_config.format`; send one of them")
        return self

    @property
    def answer_format(self) -> tuple[str, OutputFormat] | None:
        """With the name of its field."""
        if self.output_config is not None and self.output_config.format is not None:
            return "output_config.format", self.output_config.format
        return None if self.output_format is None else ("output_format", self.output_format)


class MessagesRequest(CountTokensRequest):
    """Body of a request for a message."""

    max_tokens: TokenLimit = Field(description="most tokens to generate; -1 = as many as fit the context")
    stop_sequences: list[str] | None = Field(
        None, description="strings that end the answer and are not part of it; limits as of stop"
    )
    stream: bool | None = Field(None, description="send the answer as server-sent events")
    metadata: dict[str, Any] | None = Field(None, description="ignored")


class TokenCount(BaseModel):
    input_tokens: int
