"""Several choices of one answer, as one end of a generation: what they took together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

import msgspec

from s2moe.engine.messages import ExpertUse, Finished, SpeculationReport, Timings

_OF_THE_LAST: Final = frozenset(
    {
        *("method", "preset", "disabled_reason", "error_budget", "controller_state", "draft_length"),
        *("is_paced", "verify_fit", "draft_fit", "single_seconds"),
    }
)
"""Fields of SpeculationReport that say how things stood at the end; the others are counts and times."""


def total_of(finished: Sequence[Finished], *, per_prompt: int) -> Finished:
    """One Finished for all, at least one, of which `per_prompt` in a row have the same prompt. Prompt tokens
    count once per prompt, as OpenAI does; of the later choices they come from the cache."""
    if len(finished) == 1:
        return finished[0]
    prompts = finished[::per_prompt]
    return msgspec.structs.replace(
        finished[-1],
        n_prompt_tokens=sum(each.n_prompt_tokens for each in prompts),
        n_cached_tokens=sum(each.n_cached_tokens for each in prompts),
        n_completion_tokens=sum(each.n_completion_tokens for each in finished),
        n_reasoning_tokens=sum(each.n_reasoning_tokens for each in finished),
        timings=_timings([each.timings for each in finished]),
    )


def _timings(timings: Sequence[Timings]) -> Timings:
    """What an answer shows; durations by bucket are the metrics' alone, which see each choice."""
    return Timings(
        prefill_seconds=sum(each.prefill_seconds for each in timings),
        decode_seconds=sum(each.decode_seconds for each in timings),
        n_decode_steps=sum(each.n_decode_steps for each in timings),
        prefill_experts=_expert_use([each.prefill_experts for each in timings]),
        decode_experts=_expert_use([each.decode_experts for each in timings]),
        speculation=_speculation([each.speculation for each in timings]),
    )


def _expert_use(uses: Sequence[ExpertUse | None]) -> ExpertUse | None:
    there = [use for use in uses if use is not None]
    if not there:
        return None
    return ExpertUse(
        n_lookups=sum(use.n_lookups for use in there),
        n_misses=sum(use.n_misses for use in there),
        read_bytes=sum(use.read_bytes for use in there),
        stall_seconds=sum(use.stall_seconds for use in there),
    )


def _speculation(reports: Sequence[SpeculationReport | None]) -> SpeculationReport | None:
    there = [report for report in reports if report is not None]
    if not there:
        return None
    sums = {
        name: _sum([getattr(report, name) for report in there])
        for name in SpeculationReport.__struct_fields__
        if name not in _OF_THE_LAST
    }
    return msgspec.structs.replace(there[-1], **sums)


def _sum(values: Sequence[Any]) -> Any:
    """Of numbers; of lists and tuples, which may be of different lengths, element by element."""
    first = values[0]
    if isinstance(first, list | tuple):
        return type(first)(_sum(column) for column in _columns(values))
    return sum(values)


def _columns(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [[each for each in column if each is not None] for column in zip_longest(*rows)]
