"""The error body that every endpoint answers with."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class ErrorDetail(BaseModel):
    model_config = ConfigDict(extra="allow")

    message: str = Field(description="What went wrong and what to do")
    type: str = Field(description="Class of error, such as invalid_request_error")
    param: str | None = Field(description="The request field at fault, such as messages[0].content")
    code: str = Field(description="The case, such as context_length_exceeded")


class ErrorBody(BaseModel):
    error: ErrorDetail


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses=` argument of a route that may answer with these statuses."""
    return {status: {"model": ErrorBody} for status in statuses}
