"""`POST /v1/responses`: every request field declared once, with limits and description.

Unknown fields are ignored; null means absent. The fields of `SamplingFields` that OpenAI does not have here
mean the same as in chat completions, and those of `ForeignFormats` are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from s2moe.server.schema.chat import MAX_MESSAGES, MAX_TOP_LOGPROBS
from s2moe.server.schema.foreign_formats import ForeignFormats
from s2moe.server.schema.sampling import SamplingFields, TokenLimit, fail, shown
from s2moe.server.schema.text_parts import join_parts

FUNCTION = "function"
TEXT_LOGPROBS = "message.output_text.logprobs"
_STRICT = ConfigDict(strict=True, hide_input_in_errors=True)
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_REASONING_TEXTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
_NEEDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_TEXT_FIELDS = ("content", "output")
"""Of which null is no text."""
_MODES = ("auto", "none", "required")


def _check_type(value: object) -> object:
    if value is None:
        return "message"
    if value == "item_reference":
        raise fail("this server stores nothing that an item could refer to; send the item itself")
    if not isinstance(value, str) or value not in _NEEDS:
        raise fail(f"an item of type {shown(value)} is not supported; use one of {', '.join(_NEEDS)}")
    return value


def _check_role(value: object) -> object:
    if value is not None and value not in _ROLES:
        raise fail(f"the role {shown(value)} is not supported; use one of {', '.join(_ROLES)}")
    return value


def _join_content(value: object) -> object:
    return join_parts(value, _TEXTS | _REASONING_TEXTS)


def _join_reasoning(value: object) -> object:
    return join_parts(value, _REASONING_TEXTS, separator="\n")


def _as_items(value: object) -> object:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise fail("input is a string or a list of items")
    if not value:
        raise fail("the input is empty")
    if len(value) > MAX_MESSAGES:
        raise fail(f"at most {MAX_MESSAGES} items are allowed")
    return value


def _only_type_of_foreign(value: object) -> object:
    """Tools that are not functions are skipped, so nothing of them can be wrong."""
    kind = value.get("type") if isinstance(value, dict) else None
    return {"type": kind} if isinstance(kind, str) and kind != FUNCTION else value


def _check_tool_choice(value: object) -> object:
    if value is None or value in _MODES:
        return value
    if isinstance(value, dict):
        kind, name = value.get("type"), value.get("name")
        if kind == FUNCTION and isinstance(name, str):
            return value
        if kind == "allowed_tools" and value.get("mode") in ("auto", "required"):
            tools = value.get("tools")
            if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
                return value
    raise fail(
        f"tool_choice is one of {', '.join(_MODES)}, or an object: of type `function` with a `name`, or of "
        "type `allowed_tools` with `mode` (auto or required) and `tools`"
    )


class InputPart(BaseModel):
    """A part of a content. Images, files and audio are not supported."""

    type: Literal["input_text", "output_text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None


Parts = str | list[InputPart]


class InputItem(BaseModel):
    """One item of the conversation: a message if it has no type."""

    model_config = _STRICT

    type: Annotated[
        Literal["message", "function_call", "function_call_output", "reasoning"], BeforeValidator(_check_type)
    ] = "message"
    role: Annotated[
        Literal["user", "assistant", "system", "developer"] | None, BeforeValidator(_check_role)
    ] = Field(None, description="of a message; developer means system")
    content: Annotated[str | None, BeforeValidator(_join_content, json_schema_input_type=Parts | None)] = (
        Field(None, description="of a message or reasoning: text, or text parts, which are joined")
    )
    summary: Annotated[str | None, BeforeValidator(_join_reasoning, json_schema_input_type=Parts | None)] = (
        Field(None, description="of reasoning, used where it has no content")
    )
    call_id: str | None = Field(None, description="of a function_call and its function_call_output")
    name: str | None = Field(None, description="of a function_call")
    arguments: str | None = Field(None, description="of a function_call: JSON text")
    output: Annotated[str | None, BeforeValidator(_join_content, json_schema_input_type=Parts | None)] = (
        Field(None, description="of a function_call_output: text, or text parts, which are joined")
    )

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> InputItem:
        for name in _NEEDS[self.type]:
            is_empty = name in _TEXT_FIELDS and name in self.model_fields_set
            if getattr(self, name) is None and not is_empty:
                raise fail(f"an item of type {self.type} needs `{name}`")
        return self


class ResponsesTool(BaseModel):
    """A function. Tools of any other type are skipped: the server cannot run them."""

    model_config = _STRICT

    type: str = Field(description="function")
    name: str | None = Field(None, description="required for a function")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_name(self) -> ResponsesTool:
        if self.type == FUNCTION and self.name is None:
            raise fail("a function needs `name`, beside `type`")
        return self


class TextFormat(BaseModel):
    model_config = _STRICT

    type: str = Field(description="text, json_object or json_schema")
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="required for json_schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise fail("the type json_schema needs `schema`")
        return self


class TextConfig(BaseModel):
    model_config = _STRICT

    format: TextFormat | None = Field(None, description="form of the answer's text; absent = text")


class ReasoningConfig(BaseModel):
    model_config = _STRICT

    effort: str | None = Field(None, description="as reasoning_effort of chat completions")
    summary: str | None = Field(
        None, description="any value: the reasoning, as it is, is also given as its summary"
    )


class ResponsesRequest(ForeignFormats, SamplingFields):
    """Body of a request for a response."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, hide_input_in_errors=True)
    FORMAT_FIELD: ClassVar[str] = "text.format"

    input: Annotated[
        list[InputItem],
        FailFast(),
        BeforeValidator(
            _as_items,
            json_schema_input_type=str
            | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)],
        ),
    ] = Field(description="the conversation so far: text of the user, or items")
    model: str | None = Field(
        None, description="any name is served by the loaded model, unless the server runs with --strict-model"
    )
    instructions: str | None = Field(None, description="system message ahead of the input")
    stream: bool | None = Field(None, description="send the answer as server-sent events")
    max_output_tokens: TokenLimit | None = Field(
        None, description="most tokens to generate; absent or -1 = as many as fit the context"
    )
    tools: list[Annotated[ResponsesTool, BeforeValidator(_only_type_of_foreign)]] | None = Field(
        None, max_length=1024, description="functions that the model may call; other tools are skipped"
    )
    tool_choice: Annotated[str | dict[str, Any] | None, BeforeValidator(_check_tool_choice)] = Field(
        None, description="auto, none, required, a function, or a choice of allowed_tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="false = at most one call; absent = true")
    text: TextConfig | None = Field(None, description="form of the answer's text")
    reasoning: ReasoningConfig | None = Field(None, description="how much is thought before")
    metadata: dict[str, str] | None = Field(None, max_length=64, description="given back with the answer")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="nothing is ever dropped: input that does not fit the context is an error"
    )
    store: bool | None = Field(None, description="ignored: nothing is stored")
    previous_response_id: str | None = Field(None, description="only null: nothing is stored")
    # any: an error would name the members of a union as if they were fields
    conversation: Any = Field(None, description="only null: nothing is stored")
    prompt: dict[str, Any] | None = Field(None, description="only null: nothing is stored")
    background: bool | None = Field(None, description="only false")
    include: list[str] | None = Field(
        None,
        description=f"{TEXT_LOGPROBS} = how likely the model found each token of the text, before penalties "
        "and temperature; all else is ignored",
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description=f"and so many of the likeliest; needs {TEXT_LOGPROBS} in include",
    )

    @property
    def wants_logprobs(self) -> bool:
        return TEXT_LOGPROBS in (self.include or ())

    def unsupported_field(self) -> tuple[str, str] | None:
        """The first field that would change the answer and cannot be honoured, with the reason."""
        stateless = "this server stores no {}; send the whole conversation as `input`"
        if self.previous_response_id is not None:
            return "previous_response_id", stateless.format("responses")
        if self.conversation is not None:
            return "conversation", stateless.format("conversations")
        if self.prompt is not None:
            return "prompt", "this server stores no prompts; send the text as `instructions` or `input`"
        if self.background:
            return "background", "this server stores no responses; wait for the answer, or stream it"
        if self.top_logprobs and not self.wants_logprobs:
            return "top_logprobs", f"it needs `{TEXT_LOGPROBS}` in `include`"
        for name in self.include or ():
            # whoever asks for log probabilities must not go without them
            if "logprobs" in name and name != TEXT_LOGPROBS:
                return "include", f"{shown(name)} is not known; log probabilities are `{TEXT_LOGPROBS}`"
        return None
