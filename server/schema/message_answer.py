"""The answer of `POST /v1/messages`, and the shape of errors there."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class AnswerBlock(BaseModel):
    """A text, a tool_use or thinking, in the order in which the model wrote them."""

    type: Literal["text", "tool_use", "thinking"]
    text: str | None = Field(None, description="of a text")
    id: str | None = Field(None, description="of a tool_use: what its result refers to")
    name: str | None = Field(None, description="of a tool_use")
    input: dict[str, Any] | None = Field(None, description="of a tool_use; empty where max_tokens cut it")
    thinking: str | None = Field(None, description="of thinking")
    signature: str | None = Field(None, description="of thinking; means nothing")


class MessageUsage(BaseModel):
    input_tokens: int = Field(description="tokens of the prompt that were evaluated")
    cache_creation_input_tokens: int = Field(description="always 0: nothing is cached at a price")
    cache_read_input_tokens: int = Field(
        description="the other tokens of the prompt: their evaluation was reused"
    )
    output_tokens: int


class MessageAnswer(BaseModel):
    """Answer of a request without stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None = Field(description="the one that ended the answer")
    usage: MessageUsage


class MessageErrorDetail(BaseModel):
    type: str = Field(description="Class of error, such as invalid_request_error")
    message: str = Field(description="What went wrong and what to do")


class MessageError(BaseModel):
    type: Literal["error"] = "error"
    error: MessageErrorDetail
    request_id: str | None


def message_error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses=` argument of a route that may answer with these statuses."""
    return {status: {"model": MessageError} for status in statuses}
