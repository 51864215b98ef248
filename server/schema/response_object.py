"""The answer of `POST /v1/responses`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from s2moe.server.schema.chat import TokenLogprob
from s2moe.server.schema.speculation import Speculation
from s2moe.server.schema.timings import Timings

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class InputTokensDetails(BaseModel):
    cached_tokens: int = Field(description="input tokens whose evaluation was reused")
    cache_write_tokens: int = Field(description="always 0: nothing is written for later at a price")


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputPart(BaseModel):
    type: Literal["output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = Field(None, description="of an output_text; always empty")
    logprobs: list[TokenLogprob] | None = Field(
        None, description="of an output_text: its tokens, if the request asked for them; else empty"
    )


class OutputItem(BaseModel):
    """A message, a function_call or reasoning, in the order in which the model wrote them."""

    type: Literal["message", "function_call", "reasoning"]
    id: str
    status: Status
    role: Literal["assistant"] | None = Field(None, description="of a message")
    content: list[OutputPart] | None = Field(None, description="of a message or reasoning")
    summary: list[OutputPart] | None = Field(
        None, description="of reasoning: its text once more if the request asked for a summary"
    )
    call_id: str | None = Field(None, description="of a function_call: what its output refers to")
    name: str | None = Field(None, description="of a function_call")
    arguments: str | None = Field(None, description="of a function_call: JSON text; cut where the answer was")


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseFailure(BaseModel):
    code: str
    message: str


class ResponseObject(BaseModel):
    """Answer of a request without stream, and member of the first and last events of a stream."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = Field(description="null until the response has ended")
    incomplete_details: IncompleteDetails | None
    error: ResponseFailure | None = Field(description="of a failed response, in a stream")
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    background: Literal[False]
    store: Literal[False]
    truncation: Literal["disabled"]
    reasoning: dict[str, Any] = Field(description="effort and summary of the request")
    temperature: float | None
    top_p: float | None
    top_logprobs: int
    text: dict[str, Any] = Field(description="format of the request")
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]] = Field(description="functions of the request, without tools of other types")
    timings: Timings | None = Field(None, description="there when the response has ended")
    speculation: Speculation | None = Field(None, description="there when the request had a speculator")


class ResponseInputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int
