"""What several choices of one answer took together."""

from __future__ import annotations

from typing import Any

import msgspec

from s2moe.engine.messages import CostFit, ExpertUse, Finished, SpeculationReport, Timings
from s2moe.server.stream.choices import total_of

USE = ExpertUse(n_lookups=1, n_misses=2, read_bytes=3, stall_seconds=0.5)


def finished(**fields: Any) -> Finished:
    return Finished(**{"request_id": "r", "reason": "stop", **fields})


def with_timings(**fields: Any) -> Finished:
    return finished(timings=Timings(**fields))


def test_a_single_choice_is_its_own_total() -> None:
    only = finished(n_prompt_tokens=3)
    assert total_of([only], per_prompt=1) is only


def test_prompt_tokens_count_once_per_prompt_and_others_each_time() -> None:
    ends = [
        finished(n_prompt_tokens=5, n_cached_tokens=1, n_completion_tokens=2, n_reasoning_tokens=1),
        finished(n_prompt_tokens=5, n_cached_tokens=4, n_completion_tokens=3),
        finished(n_prompt_tokens=7, n_cached_tokens=0, n_completion_tokens=4),
        finished(n_prompt_tokens=7, n_cached_tokens=6, n_completion_tokens=5, reason="length"),
    ]
    total = total_of(ends, per_prompt=2)
    assert (total.n_prompt_tokens, total.n_cached_tokens) == (12, 1)
    assert (total.n_completion_tokens, total.n_reasoning_tokens) == (14, 1)
    assert total.reason == "length"


def test_times_and_experts_add_up() -> None:
    first = with_timings(
        prefill_seconds=1.0, decode_seconds=2.0, n_decode_steps=3, prefill_experts=USE, decode_experts=USE
    )
    second = with_timings(prefill_seconds=0.5, decode_seconds=0.25, n_decode_steps=4, decode_experts=USE)
    timings = total_of([first, second], per_prompt=2).timings
    assert (timings.prefill_seconds, timings.decode_seconds, timings.n_decode_steps) == (1.5, 2.25, 7)
    assert timings.prefill_experts == USE
    assert timings.decode_experts == ExpertUse(n_lookups=2, n_misses=4, read_bytes=6, stall_seconds=1.0)
    assert timings.speculation is None


def test_counts_of_speculation_add_up_and_states_are_the_last_ones() -> None:
    first = SpeculationReport(
        method="s2moe",
        preset="balanced",
        n_steps=3,
        n_drafted=10,
        draft_seconds=0.5,
        acceptance_lengths=[1, 2],
        admitted_by_depth=[5, 3],
        controller_state="drafting",
        draft_length=2.5,
        verify_fit=CostFit(r2=0.5, n=10),
        error_budget=0.1,
    )
    second = msgspec.structs.replace(
        first,
        n_steps=4,
        acceptance_lengths=[1, 1, 1],
        admitted_by_depth=[4],
        controller_state="paused",
        draft_length=1.5,
    )
    total = total_of(
        [with_timings(speculation=first), with_timings(speculation=second)], per_prompt=1
    ).timings.speculation
    assert total is not None
    assert (total.n_steps, total.n_drafted, total.draft_seconds) == (7, 20, 1.0)
    assert total.acceptance_lengths == [2, 3, 1]
    assert total.admitted_by_depth == [9, 3]
    assert (total.method, total.preset, total.controller_state) == ("s2moe", "balanced", "paused")
    assert (total.draft_length, total.error_budget, total.verify_fit) == (1.5, 0.1, CostFit(r2=0.5, n=10))


def test_each_field_of_the_report_is_taken_care_of() -> None:
    """A field of a type that cannot be added must be named as one that the last choice decides."""
    report = SpeculationReport(method="s2moe")
    ends = [with_timings(speculation=report)] * 2
    assert total_of(ends, per_prompt=1).timings.speculation == report
