"""From the totals of the expert cache to what is reported: increments, gauges, a request's share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from s2moe.engine.messages import (
    ExpertActivity,
    ExpertCache,
    ExpertLoads,
    ExpertPhase,
    ExpertUse,
    GpuActivity,
    GpuPhase,
    GpuSlots,
)
from s2moe.engine.native_experts import ExpertStats, Phase, SlotStats, Trigger


class StatsSource(Protocol):
    """What is read of an expert cache; `native_experts.Experts` is one."""

    def stats(self) -> ExpertStats:
        """Totals since the cache was opened. May be called while a decode runs."""
        ...

    def reader(self) -> dict[str, Any]:
        """How experts are read: "io", "reader", "reason"."""
        ...


class ActivityMeter:
    """Cuts growing totals into increments: each event is in exactly one of the values that `read` returns."""

    def __init__(self) -> None:
        self._reported = ExpertStats()
        self._reported_slots = SlotStats()

    def read(self, total: ExpertStats, slots: SlotStats | None = None) -> ExpertActivity | None:
        """What happened since the call before, which for the first is all; None when nothing did. `slots`: of
        a GPU, if there are any."""
        activity = _activity_between(self._reported, total)
        self._reported = total
        if slots is not None:
            activity = msgspec.structs.replace(activity, gpu=_gpu_between(self._reported_slots, slots))
            self._reported_slots = slots
        return None if activity == _NOTHING else activity


def cache_gauges(stats: ExpertStats, reader: dict[str, Any], slots: SlotStats | None = None) -> ExpertCache:
    """What the cache holds now; `reader` as `StatsSource.reader` returns it."""
    gpu = None
    if slots is not None:
        gpu = GpuSlots(
            resident_experts=slots.resident_experts,
            resident_bytes=slots.resident_bytes,
            capacity_experts=slots.capacity_experts,
            capacity_bytes=slots.capacity_bytes,
        )
    return ExpertCache(
        tier="pinned" if slots is not None and slots.pinned_bytes else "pageable",
        gpu=gpu,
        resident_experts=stats.resident_experts,
        resident_bytes=stats.resident_bytes,
        capacity_experts=stats.capacity_experts,
        capacity_bytes=stats.capacity_bytes,
        io=reader["io"],
        reader=reader["reader"],
        reason=reader["reason"],
    )


class UseMeter:
    """Measures what one phase of a request asks of the cache, from its creation on.

    The phases are the request's: a last chunk of the prompt counts as prefill however short it is, which the
    totals of the cache, that only see a decode's width, count otherwise.
    """

    def __init__(self, source: StatsSource | None) -> None:
        self._source = source
        self._before = None if source is None else source.stats()

    def read(self) -> ExpertUse | None:
        """None without a cache."""
        if self._source is None or self._before is None:
            return None
        return use_between(self._before, self._source.stats())


def use_between(before: ExpertStats, after: ExpertStats) -> ExpertUse:
    """What was asked of the cache between two totals of it, whatever the width of the decodes."""
    asked_bytes = sum(
        after.load_bytes[trigger] - before.load_bytes[trigger]
        for trigger in (Trigger.DEMAND, Trigger.PREFETCH)
    )
    n_misses = _sum_of_growth(before.misses, after.misses)
    n_found = _sum_of_growth(before.hits, after.hits) + _sum_of_growth(before.prefetched, after.prefetched)
    return ExpertUse(
        n_lookups=n_misses + n_found,
        n_misses=n_misses,
        read_bytes=asked_bytes,
        stall_seconds=sum(after.stall_seconds) - sum(before.stall_seconds),
    )


def _activity_between(before: ExpertStats, after: ExpertStats) -> ExpertActivity:
    def phase(index: Phase) -> ExpertPhase:
        return ExpertPhase(
            hits=after.hits[index] - before.hits[index],
            misses=after.misses[index] - before.misses[index],
            prefetched=after.prefetched[index] - before.prefetched[index],
            stall_seconds=after.stall_seconds[index] - before.stall_seconds[index],
            compute_seconds=after.compute_seconds[index] - before.compute_seconds[index],
        )

    def loads(index: Trigger) -> ExpertLoads:
        return ExpertLoads(
            n_loads=after.loads[index] - before.loads[index],
            n_bytes=after.load_bytes[index] - before.load_bytes[index],
        )

    durations = _growth(before.load_duration_counts, after.load_duration_counts)
    return ExpertActivity(
        prefill=phase(Phase.PREFILL),
        decode=phase(Phase.DECODE),
        demand=loads(Trigger.DEMAND),
        prefetch=loads(Trigger.PREFETCH),
        warmup=loads(Trigger.WARMUP),
        load_duration_counts=durations if any(durations) else [],
        load_duration_seconds=after.load_duration_seconds - before.load_duration_seconds,
        read_seconds=after.read_seconds - before.read_seconds,
        evictions=after.evictions - before.evictions,
        prefetches_used=after.prefetches_used - before.prefetches_used,
        prefetches_late=after.prefetches_late - before.prefetches_late,
        prefetches_wasted=after.prefetches_wasted - before.prefetches_wasted,
        read_errors=after.read_errors - before.read_errors,
    )


def _gpu_between(before: SlotStats, after: SlotStats) -> GpuActivity:
    def phase(index: Phase) -> GpuPhase:
        return GpuPhase(
            demand=ExpertLoads(
                n_loads=after.misses[index] - before.misses[index],
                n_bytes=after.demand_bytes[index] - before.demand_bytes[index],
            ),
            requests=after.requests[index] - before.requests[index],
            copy_seconds=after.copy_seconds[index] - before.copy_seconds[index],
            synchronizations=after.synchronizations[index] - before.synchronizations[index],
        )

    return GpuActivity(
        prefill=phase(Phase.PREFILL),
        decode=phase(Phase.DECODE),
        prefetch=ExpertLoads(
            n_loads=after.promotions - before.promotions,
            n_bytes=after.promoted_bytes - before.promoted_bytes,
        ),
        evictions=after.evictions - before.evictions,
    )


_NOTHING = ExpertActivity()


def _growth(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [new - old for old, new in zip(before, after, strict=True)]


def _sum_of_growth(before: Sequence[int], after: Sequence[int]) -> int:
    return sum(after) - sum(before)
