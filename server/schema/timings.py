"""Speed data of an answer, under llama-server's key names (Open WebUI and others read them)."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Timings(BaseModel):
    cache_n: int = Field(description="prompt tokens reused")
    prompt_n: int = Field(description="prompt tokens evaluated")
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int = Field(description="tokens generated")
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
