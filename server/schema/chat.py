"""`POST /v1/chat/completions`: every request field declared once, with limits and description.

Unknown fields are ignored, but for those inside `s2moe`; null means absent. Numbers are strict: `"0.5"`
and `true` are not numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from s2moe.server.schema.sampling import SamplingFields, fail
from s2moe.server.schema.speculation import Speculation
from s2moe.server.schema.timings import Timings

MAX_MESSAGES = 2048
_ROLES = ("system", "developer", "user", "assistant")


def _check_role(value: object) -> object:
    if not isinstance(value, str):
        raise fail("a role is a string")
    if value not in _ROLES:
        raise fail(f"role {value[:40]!r} is not supported; use one of {', '.join(_ROLES)}")
    return value


def _join_parts(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fail("content is a string, null or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            named = f"of type {kind[:40]!r}" if isinstance(kind, str) else "without a type"
            raise fail(f"part {index} {named} is not supported; this model reads text parts only")
        text = part.get("text")
        if not isinstance(text, str):
            raise fail(f"part {index} has no string `text`")
        texts.append(text)
    return "".join(texts)


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(strict=True)

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_check_role)] = (
        Field(description="developer means system")
    )
    content: Annotated[str | list[TextPart] | None, BeforeValidator(_join_parts)] = Field(
        None, description="text, null (allowed for the assistant), or text parts, which are joined"
    )
    name: str | None = Field(None, description="accepted and ignored")
    tool_calls: list[Any] | None = Field(None, description="only null or empty")

    @model_validator(mode="after")
    def _check(self) -> ChatMessage:
        if self.tool_calls:
            raise fail("tool calls in the history are not supported")
        if self.content is None and self.role != "assistant":
            raise fail(f"a {self.role} message needs content")
        return self

    def to_wire(self) -> dict[str, str]:
        """The message as the engine expects it: string content, roles system, user, assistant."""
        assert self.content is None or isinstance(self.content, str)
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(None, description="send a last chunk with the token counts")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str = Field(description="only text")


class ChatRequest(SamplingFields):
    """Body of a chat completion request."""

    model_config = ConfigDict(
        strict=True, allow_inf_nan=False, hide_input_in_errors=True, title="ChatCompletionRequest"
    )

    messages: Annotated[list[ChatMessage], FailFast()] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="the conversation so far"
    )
    model: str | None = Field(
        None, description="any name is served by the loaded model, unless the server runs with --strict-model"
    )
    stream: bool | None = Field(None, description="send the answer as server-sent events")
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate")
    max_completion_tokens: int | None = Field(None, ge=1, description="same as max_tokens; wins over it")
    n: int | None = Field(None, description="only 1")
    logprobs: bool | None = Field(None, description="only false")
    top_logprobs: int | None = Field(None, description="only 0")
    tools: list[Any] | None = Field(None, description="only null or empty")
    functions: list[Any] | None = Field(None, description="only null or empty")
    response_format: ResponseFormat | None = Field(None, description="only text")

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def unsupported_field(self) -> tuple[str, str] | None:
        """The first field that would change the answer and cannot be honoured, with the reason."""
        if self.n is not None and self.n != 1:
            return "n", "only one answer per request is supported (n = 1)"
        if self.tools:
            return "tools", "tools are not supported"
        if self.functions:
            return "functions", "functions are not supported"
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format", "only the response format `text` is supported"
        if self.logprobs:
            return "logprobs", "log probabilities are not supported"
        if self.top_logprobs:
            return "top_logprobs", "log probabilities are not supported"
        return None


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="prompt tokens whose evaluation was reused")


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: str | None = Field(None, description="present only when the model reasoned")
    reasoning: str | None = Field(None, description="same text as reasoning_content")


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: None = None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """Answer of a request without stream."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    timings: Timings
    speculation: Speculation | None = Field(None, description="there when the request had a speculator")
