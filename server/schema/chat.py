"""`POST /v1/chat/completions`: every request field declared once, with limits and description.

Unknown fields are ignored, but for those inside `s2moe`; null means absent. Numbers are strict: `"0.5"`
and `true` are not numbers. What several fields say together is checked by `chat_job`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from s2moe.server.schema.chat_message import ChatMessage
from s2moe.server.schema.json_value import MAX_DEPTH, is_too_deep, refuse
from s2moe.server.schema.sampling import SamplingFields, TokenLimit, fail
from s2moe.server.schema.speculation import Speculation
from s2moe.server.schema.timings import Timings
from s2moe.server.schema.tools import MAX_TOOLS, ResponseFormat, Tool, ToolChoice

MAX_MESSAGES = 2048
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_TEMPLATE_VARIABLES = 64
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
_USE_RESPONSE_FORMAT = refuse("use `response_format`")
_REFUSED = "refused where set: use response_format"


def _check_modalities(value: object) -> None:
    if value and value != ["text"]:
        raise fail('this server answers in text only; leave it out or send ["text"]')


def _check_search(value: object) -> None:
    if value is not None:  # an empty object asks for a search, too
        raise fail("this server searches nothing; offer a search as one of `tools`")


def _check_variables(value: object) -> object:
    if value is None:
        return value
    if not isinstance(value, dict):
        raise fail("chat_template_kwargs is an object of variables for the chat template")
    if len(value) > MAX_TEMPLATE_VARIABLES:
        raise fail(f"at most {MAX_TEMPLATE_VARIABLES} variables are allowed")
    for name in _OWN_VARIABLES:
        if name in value:
            raise fail(f"the variable `{name}` comes from the request itself and cannot be replaced")
    if not isinstance(value.get("enable_thinking", True), bool):
        raise fail("`enable_thinking` is true or false")
    if is_too_deep(value):
        raise fail(f"a variable is nested more than {MAX_DEPTH} levels deep")
    return value


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(None, description="send a last chunk with the token counts")
    continuous_usage_stats: bool | None = Field(
        None, description="accepted and ignored: clients add up the usage of all chunks"
    )


class ChatRequest(SamplingFields):
    """Body of a chat completion request."""

    model_config = ConfigDict(
        strict=True, allow_inf_nan=False, hide_input_in_errors=True, title="ChatCompletionRequest"
    )

    messages: Annotated[list[ChatMessage], FailFast()] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="the conversation so far; a last message of the assistant is continued, see "
        "add_generation_prompt",
    )
    model: str | None = Field(
        None, description="any name is served by the loaded model, unless the server runs with --strict-model"
    )
    stream: bool | None = Field(None, description="send the answer as server-sent events")
    stream_options: StreamOptions | None = Field(None, description="what else a stream holds")
    max_tokens: TokenLimit | None = Field(
        None, description="most tokens to generate; absent or -1 = as many as fit the context"
    )
    max_completion_tokens: TokenLimit | None = Field(None, description="same as max_tokens; wins over it")
    n: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="answers to give, one after the other; with a seed, each has the next one",
    )
    logprobs: bool | None = Field(
        None,
        description="how likely the model found each token of the answer, before penalties and temperature",
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="and so many of the likeliest; needs logprobs"
    )
    tools: Annotated[list[Tool] | None, FailFast()] = Field(
        None, max_length=MAX_TOOLS, description="functions that the model may call"
    )
    tool_choice: ToolChoice = Field(
        None,
        description="auto (default) = the model decides; none = no tool is offered; required = at least one "
        "call; or the one function that is to be called",
    )
    parallel_tool_calls: bool | None = Field(None, description="false = at most one call per answer")
    functions: Annotated[Any, refuse("use `tools`")] = Field(None, description="refused where set: use tools")
    function_call: Annotated[Any, refuse("use `tools` and `tool_choice`")] = Field(
        None, description="refused where set: use tools and tool_choice"
    )
    response_format: ResponseFormat | None = Field(None, description="what the content must be")
    json_schema: Annotated[Any, _USE_RESPONSE_FORMAT] = Field(None, description=_REFUSED)
    structured_outputs: Annotated[Any, _USE_RESPONSE_FORMAT] = Field(None, description=_REFUSED)
    guided_json: Annotated[Any, _USE_RESPONSE_FORMAT] = Field(None, description=_REFUSED)
    guided_regex: Annotated[Any, refuse("use `grammar`")] = Field(
        None, description="refused where set: use grammar"
    )
    guided_choice: Annotated[Any, refuse("use `grammar`")] = Field(
        None, description="refused where set: use grammar"
    )
    guided_grammar: Annotated[Any, refuse("use `grammar`")] = Field(
        None, description="refused where set: use grammar"
    )
    regex: Annotated[Any, refuse("use `grammar`")] = Field(None, description="refused where set: use grammar")
    ebnf: Annotated[Any, refuse("use `grammar`")] = Field(None, description="refused where set: use grammar")
    modalities: Annotated[Any, BeforeValidator(_check_modalities)] = Field(
        None, description="only text: there are no spoken answers"
    )
    audio: Annotated[Any, refuse("answers are text")] = Field(
        None, description="refused where set: there are no spoken answers"
    )
    web_search_options: Annotated[Any, BeforeValidator(_check_search)] = Field(
        None, description="refused where set, also as an empty object: offer a search as one of tools"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="none = the model does not think before it answers; the others are what the chat "
        "template makes of its variable reasoning_effort",
    )
    enable_thinking: bool | None = Field(None, description="wins over reasoning_effort")
    reasoning_format: Literal["auto", "deepseek"] | None = Field(
        None, description="accepted: reasoning always comes apart from the content"
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_check_variables)] = Field(
        None, description="variables of the chat template; they win over enable_thinking and reasoning_effort"
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="true = answer also after a message of the assistant instead of continuing it; false = "
        "the prompt ends behind the last message",
    )
    continue_final_message: bool | None = Field(
        None, description="whether the last message, the assistant's, is continued (default: it is)"
    )
    return_progress: bool | None = Field(
        None, description="send llama-server's prompt_progress while the prompt is evaluated, in streams"
    )
    ignore_eos: bool | None = Field(None, description="never end by itself: for benchmarks")
    cache_prompt: bool | None = Field(None, description="accepted: what can be reused of a prompt always is")
    timings_per_token: bool | None = Field(
        None, description="accepted and ignored: timings come with the end of the answer"
    )

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def n_choices(self) -> int:
        return self.n or 1


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="prompt tokens whose evaluation was reused")


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    """Of all choices together; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class AnswerFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON; cut where the answer was")


class AnswerCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="null when there is nothing but tool calls")
    reasoning_content: str | None = Field(
        None, description="present only when the model reasoned, and with --reasoning-fields"
    )
    reasoning: str | None = Field(None, description="the same text under its other name")
    tool_calls: list[AnswerCall] | None = Field(None, description="present only when there are any")


class TopLogprob(BaseModel):
    token: str = Field(description="its text; parts of a character as U+FFFD")
    bytes: list[int] = Field(description="its text exactly")
    logprob: float = Field(description="natural logarithm, at least -9999")


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(BaseModel):
    content: list[TokenLogprob] = Field(description="of all tokens, those of reasoning and calls too")
    refusal: None = None


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


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
