"""The object `speculation` of an answer: what drafts did for it. There when the request had a speculator.

docs/speculation.md explains the words. A ratio without a denominator is null.
"""

from __future__ import annotations

from pydantic import BaseModel, Field


class Speculation(BaseModel):
    method: str = Field(description="what was used: s2moe, expert-skip, cascade or off")
    preset: str | None = Field(
        description="exact, balanced, fast, or custom if a single value was changed; null where none was used"
    )
    exact: bool = Field(description="the text is the one that the target alone gives")
    disabled_reason: str | None = Field(
        description="why nothing more was drafted: unsupported, error or context_full"
    )
    iterations: int = Field(description="steps that verified at least one draft")
    steps: int = Field(description="evaluations of the target")
    drafted: int = Field(description="drafts that were looked at")
    admitted: int = Field(description="those that were verified")
    accepted: int = Field(description="those that became part of the answer")
    acceptance_rate: float | None = Field(description="accepted / admitted")
    acceptance_length: float | None = Field(
        description="tokens per iteration, the target's own included: 1 + accepted / iterations"
    )
    mean_tokens_per_step: float | None
    admitted_by_depth: list[int] = Field(description="[7] from depth 1, the children of the root")
    accepted_by_depth: list[int] = Field(description="[7]")
    acceptance_histogram: list[int] = Field(description="[8] iterations that accepted 0, 1, … 7 drafts")
    reuse_ratio: float | None = Field(
        description="distinct experts / (rows x experts per token), of evaluations of several rows"
    )
    reuse_ratio_ungated: float | None = Field(description="the same for the router's own choice")
    experts_touched: int = Field(description="distinct experts of a layer per evaluation, summed")
    misses_avoided: int = Field(description="experts that gating kept from being read; may be below zero")
    displaced_weight: float | None = Field(
        description="share of the mixing weights that went to experts that the router would not have chosen"
    )
    error_budget: float = Field(description="limit of displaced_weight")
    biased_rows: float | None = Field(description="share of evaluated tokens with at least one changed layer")
    draft_seconds: float
    verify_seconds: float = Field(description="evaluations of the target, those of a single token included")
    sample_seconds: float
    stall_seconds: float = Field(description="waits for reads, as a part of verify_seconds")
    controller_state: str = Field(description="at the end: drafting, paused, probing or off")
    graph_builds: int = Field(description="compute graphs built")
