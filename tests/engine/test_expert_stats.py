"""Increments, gauges and a request's share, from the totals of the expert cache."""

from __future__ import annotations

import pytest
from fake_experts import FakeExperts

from s2moe.engine import messages as wire
from s2moe.engine.expert_stats import ActivityMeter, UseMeter, cache_gauges
from s2moe.engine.native_experts import LOAD_BUCKETS, ExpertStats, Phase, SlotStats, Trigger


def totals(scale: int) -> ExpertStats:
    """Every field different, every one grown in proportion to `scale`."""
    stats = ExpertStats()
    fill(stats, scale)
    return stats


def slot_totals(scale: int) -> SlotStats:
    stats = SlotStats()
    fill(stats, scale)
    return stats


def fill(stats: ExpertStats | SlotStats, scale: int) -> None:
    value = 0
    for name, _ in stats._fields_:
        field = getattr(stats, name)
        if isinstance(field, int | float):
            value += 1
            setattr(stats, name, type(field)(value * scale))
        else:
            for index in range(len(field)):
                value += 1
                field[index] = value * scale


def test_wire_and_library_agree_on_the_buckets() -> None:
    assert wire.LOAD_DURATION_BOUNDS_SECONDS == LOAD_BUCKETS
    assert len(ExpertStats().load_duration_counts) == len(LOAD_BUCKETS) + 1


def test_first_reading_is_everything_so_far() -> None:
    one = totals(1)
    activity = ActivityMeter().read(one)
    assert activity == wire.ExpertActivity(
        prefill=wire.ExpertPhase(
            hits=one.hits[Phase.PREFILL],
            misses=one.misses[Phase.PREFILL],
            prefetched=one.prefetched[Phase.PREFILL],
            stall_seconds=one.stall_seconds[Phase.PREFILL],
            compute_seconds=one.compute_seconds[Phase.PREFILL],
        ),
        decode=wire.ExpertPhase(
            hits=one.hits[Phase.DECODE],
            misses=one.misses[Phase.DECODE],
            prefetched=one.prefetched[Phase.DECODE],
            stall_seconds=one.stall_seconds[Phase.DECODE],
            compute_seconds=one.compute_seconds[Phase.DECODE],
        ),
        demand=wire.ExpertLoads(n_loads=one.loads[0], n_bytes=one.load_bytes[0]),
        prefetch=wire.ExpertLoads(n_loads=one.loads[1], n_bytes=one.load_bytes[1]),
        warmup=wire.ExpertLoads(n_loads=one.loads[2], n_bytes=one.load_bytes[2]),
        load_duration_counts=list(one.load_duration_counts),
        load_duration_seconds=one.load_duration_seconds,
        read_seconds=one.read_seconds,
        evictions=one.evictions,
        prefetches_used=one.prefetches_used,
        prefetches_late=one.prefetches_late,
        prefetches_wasted=one.prefetches_wasted,
        read_errors=one.read_errors,
    )


def test_increments_add_up_to_the_totals() -> None:
    meter, whole = ActivityMeter(), ActivityMeter()
    first, second = meter.read(totals(3)), meter.read(totals(10))
    assert first == whole.read(totals(3))
    assert second == ActivityMeter().read(totals(7))
    assert meter.read(totals(10)) is None


def test_slots_of_a_gpu_are_told_by_phase() -> None:
    one = slot_totals(1)
    activity = ActivityMeter().read(ExpertStats(), one)
    assert activity is not None

    def expected(phase: Phase) -> wire.GpuPhase:
        return wire.GpuPhase(
            demand=wire.ExpertLoads(n_loads=one.misses[phase], n_bytes=one.demand_bytes[phase]),
            requests=one.requests[phase],
            copy_seconds=one.copy_seconds[phase],
            synchronizations=one.synchronizations[phase],
        )

    assert activity.gpu == wire.GpuActivity(
        prefill=expected(Phase.PREFILL),
        decode=expected(Phase.DECODE),
        prefetch=wire.ExpertLoads(n_loads=one.promotions, n_bytes=one.promoted_bytes),
        evictions=one.evictions,
    )


def test_increments_of_slots_add_up_to_the_totals() -> None:
    meter = ActivityMeter()
    meter.read(totals(1), slot_totals(3))
    second = meter.read(totals(1), slot_totals(10))
    assert second is not None
    alone = ActivityMeter().read(ExpertStats(), slot_totals(7))
    assert alone is not None
    assert second.gpu == alone.gpu
    assert meter.read(totals(1), slot_totals(10)) is None


def test_gauges_alone_are_no_activity() -> None:
    stats = ExpertStats(resident_experts=3, capacity_experts=5, resident_bytes=30, capacity_bytes=50)
    assert ActivityMeter().read(stats) is None
    assert cache_gauges(stats, FakeExperts().reader()) == wire.ExpertCache(
        resident_experts=3,
        capacity_experts=5,
        resident_bytes=30,
        capacity_bytes=50,
        io="direct",
        reader="threads",
        reason="io_uring: EPERM",
    )


def test_a_request_is_charged_for_what_grew_meanwhile() -> None:
    experts = FakeExperts(totals=totals(1))
    meter = UseMeter(experts)
    assert meter.read() == wire.ExpertUse()
    now = experts.totals
    # the last chunk of a prompt may be as narrow as a decode
    now.hits[Phase.PREFILL] += 100
    now.hits[Phase.DECODE] += 20
    now.misses[Phase.PREFILL] += 7
    now.misses[Phase.DECODE] += 1
    now.prefetched[Phase.PREFILL] += 3
    now.stall_seconds[Phase.PREFILL] += 0.5
    now.stall_seconds[Phase.DECODE] += 0.25
    now.load_bytes[Trigger.DEMAND] += 800
    now.load_bytes[Trigger.PREFETCH] += 300
    now.load_bytes[Trigger.WARMUP] += 5000
    assert meter.read() == wire.ExpertUse(n_lookups=131, n_misses=8, read_bytes=1100, stall_seconds=0.75)


def test_without_a_cache_there_is_nothing_to_charge() -> None:
    assert UseMeter(None).read() is None


def test_stats_survive_the_wire() -> None:
    activity = ActivityMeter().read(totals(2))
    sent = wire.EngineStats(
        experts=activity,
        expert_cache=cache_gauges(totals(2), FakeExperts().reader()),
        memory_pools=[wire.MemoryPool(pool="kv", budget_bytes=5, used_bytes=4)],
        memory_pressure_events={"shrink_cache": 1},
    )
    assert wire.FrameReader(from_engine=True).feed(wire.encode_frame(sent)) == [sent]


@pytest.mark.parametrize("message", [wire.EngineStats(rss_bytes=7), wire.Timings(n_decode_steps=3)])
def test_a_model_without_a_cache_sends_nothing_of_it(message: wire.Message) -> None:
    assert b"expert" not in wire._encoder.encode(message)
