"""Speed data of an answer, under llama-server's key names (Open WebUI and others read them).

The keys about experts are ours. They follow llama-server's and are there when the model has an expert cache.
"""

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
    draft_n: int | None = Field(None, description="drafts verified; there when drafts were allowed")
    draft_n_accepted: int | None = Field(None, description="those that became part of the answer")
    prompt_expert_lookups: int | None = Field(
        None,
        description="experts that a layer needed while the prompt was evaluated, counted per layer and step",
    )
    prompt_expert_misses: int | None = Field(None, description="those that had to be read first")
    prompt_expert_read_bytes: int | None = Field(None, description="bytes of experts read meanwhile")
    prompt_expert_stall_ms: float | None = Field(None, description="time that computing waited for reads")
    predicted_expert_lookups: int | None = Field(None, description="the same while the answer was generated")
    predicted_expert_misses: int | None = None
    predicted_expert_read_bytes: int | None = None
    predicted_expert_stall_ms: float | None = None
