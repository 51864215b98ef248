"""`POST /v1/chat/completions`: every request field declared once, with limits and description.

Unknown fields are ignored, but for those inside `s2moe`; null means absent. Numbers are strict: `"0.5"`
and `true` are not numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from s2moe.server.schema.s2moe_options import S2moeOptions
from s2moe.server.schema.speculation import Speculation
from s2moe.server.schema.timings import Timings

MAX_MESSAGES = 2048
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
_ROLES = ("system", "developer", "user", "assistant")


def _fail(message: str) -> PydanticCustomError:
    # The template argument would read braces of the message as placeholders, so it travels as a value.
    return PydanticCustomError("invalid_value", "{reason}", {"reason": message})


def _check_role(value: object) -> object:
    if not isinstance(value, str):
        raise _fail("a role is a string")
    if value not in _ROLES:
        raise _fail(f"role {value[:40]!r} is not supported; use one of {', '.join(_ROLES)}")
    return value


def _join_parts(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _fail("content is a string, null or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            named = f"of type {kind[:40]!r}" if isinstance(kind, str) else "without a type"
            raise _fail(f"part {index} {named} is not supported; this model reads text parts only")
        text = part.get("text")
        if not isinstance(text, str):
            raise _fail(f"part {index} has no string `text`")
        texts.append(text)
    return "".join(texts)


def _stop_list(value: object) -> object:
    if value is None:
        return value
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _fail("stop is a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise _fail(f"at most {MAX_STOP_STRINGS} stop strings are allowed")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise _fail(f"a stop string has at most {MAX_STOP_CHARACTERS} characters")
    if "" in stops:
        raise _fail("a stop string must not be empty")
    return stops


def _token_biases(value: object) -> object:
    if value is None:
        return value
    if not isinstance(value, dict):
        raise _fail("logit_bias is an object of token ids and numbers")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        # Up to ten digits: int() of a longer text is slow, and no vocabulary is that large.
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) < 2**31):
            raise _fail(f"{token[:40]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise _fail(f"the bias of token {token} is not a number from -100 to 100")
        biases[int(token)] = float(bias)
    return biases


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
            raise _fail("tool calls in the history are not supported")
        if self.content is None and self.role != "assistant":
            raise _fail(f"a {self.role} message needs content")
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


class ChatRequest(BaseModel):
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
    temperature: float | None = Field(None, ge=0, le=2, description="0 = always the likeliest token")
    top_p: float | None = Field(None, gt=0, le=1, description="sample among the likeliest that sum to this")
    top_k: int | None = Field(None, ge=0, le=2**31 - 1, description="sample among this many; 0 = all")
    min_p: float | None = Field(None, ge=0, le=1, description="drop tokens below this share of the best one")
    seed: int | None = Field(None, description="taken modulo 2^32; absent = random")
    stop: Annotated[str | list[str] | None, BeforeValidator(_stop_list)] = Field(
        None, description=f"up to {MAX_STOP_STRINGS} strings that end the answer and are not part of it"
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_penalty: float | None = Field(None, ge=0.001, le=100, description="1 = none")
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_token_biases)] = Field(
        None, description="token ids to values from -100 to 100"
    )
    grammar: str | None = Field(
        None, max_length=64 * 1024, description="GBNF grammar that the answer must match"
    )
    n: int | None = Field(None, description="only 1")
    logprobs: bool | None = Field(None, description="only false")
    top_logprobs: int | None = Field(None, description="only 0")
    tools: list[Any] | None = Field(None, description="only null or empty")
    functions: list[Any] | None = Field(None, description="only null or empty")
    response_format: ResponseFormat | None = Field(None, description="only text")
    s2moe: S2moeOptions | None = Field(None, description="how this answer is decoded")

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

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
