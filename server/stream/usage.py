"""What a finished request took: OpenAI's `usage`, llama-server's `timings`, our `speculation`."""

from __future__ import annotations

from typing import Any

from s2moe.engine.messages import ExpertUse, Finished
from s2moe.server.stream.speculation import draft_counts_of, speculation_of

_LEAST_SECONDS = 1e-9
"""Below the clock's resolution a time is no basis for a rate."""


def usage_of(event: Finished) -> dict[str, Any]:
    return {
        "prompt_tokens": event.n_prompt_tokens,
        "completion_tokens": event.n_completion_tokens,
        "total_tokens": event.n_prompt_tokens + event.n_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": event.n_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": event.n_reasoning_tokens},
    }


def performance_of(event: Finished) -> dict[str, Any]:
    """`timings`, and `speculation` when the request had a speculator: members of the answer itself."""
    timings: dict[str, Any] = {"timings": timings_of(event)}
    report = event.timings.speculation
    return timings if report is None else {**timings, "speculation": speculation_of(report)}


def timings_of(event: Finished) -> dict[str, float]:
    """Rates are 0 where nothing was computed: JSON has no infinity and clients expect numbers."""
    n_prompt = event.n_prompt_tokens - event.n_cached_tokens
    n_predicted = event.n_completion_tokens
    prompt_seconds = event.timings.prefill_seconds
    predicted_seconds = event.timings.decode_seconds
    predicted_per_second = n_predicted / predicted_seconds if predicted_seconds > _LEAST_SECONDS else 0.0
    return {
        "cache_n": event.n_cached_tokens,
        "prompt_n": n_prompt,
        "prompt_ms": prompt_seconds * 1e3,
        "prompt_per_token_ms": prompt_seconds * 1e3 / n_prompt if n_prompt else 0.0,
        "prompt_per_second": n_prompt / prompt_seconds if prompt_seconds > _LEAST_SECONDS else 0.0,
        "predicted_n": n_predicted,
        "predicted_ms": predicted_seconds * 1e3,
        "predicted_per_token_ms": predicted_seconds * 1e3 / n_predicted if n_predicted else 0.0,
        "predicted_per_second": predicted_per_second,
        **draft_counts_of(event.timings.speculation),
        **_experts_of("prompt", event.timings.prefill_experts),
        **_experts_of("predicted", event.timings.decode_experts),
    }


def _experts_of(phase: str, use: ExpertUse | None) -> dict[str, float]:
    if use is None:
        return {}
    return {
        f"{phase}_expert_lookups": use.n_lookups,
        f"{phase}_expert_misses": use.n_misses,
        f"{phase}_expert_read_bytes": use.read_bytes,
        f"{phase}_expert_stall_ms": use.stall_seconds * 1e3,
    }
