"""/metrics of the expert cache and of memory, and what an answer says of its own share."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, finished, started, step
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from server_rig import ServerRig, StartServer, chat, chunks_of

from s2moe.engine.messages import (
    LOAD_DURATION_BOUNDS_SECONDS,
    EngineStats,
    ExpertActivity,
    ExpertCache,
    ExpertLoads,
    ExpertPhase,
    ExpertUse,
    Finished,
    Generate,
    GpuActivity,
    GpuPhase,
    GpuSlots,
    MemoryPool,
    Timings,
)
from s2moe.server import expert_metrics as names
from s2moe.server.bucket_histogram import BucketHistogram
from s2moe.server.engine_client import EngineState
from s2moe.server.schema.timings import Timings as TimingsSchema

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
N_BUCKETS = len(LOAD_DURATION_BOUNDS_SECONDS) + 1
CACHE = ExpertCache(
    resident_experts=3,
    resident_bytes=300,
    capacity_experts=5,
    capacity_bytes=500,
    io="direct",
    reader="threads",
)
ACTIVITY = ExpertActivity(
    prefill=ExpertPhase(hits=1, misses=2, prefetched=3, stall_seconds=0.25, compute_seconds=0.5),
    decode=ExpertPhase(hits=4, misses=5, prefetched=6, stall_seconds=1.25, compute_seconds=1.5),
    demand=ExpertLoads(n_loads=7, n_bytes=70),
    prefetch=ExpertLoads(n_loads=9, n_bytes=90),
    warmup=ExpertLoads(n_loads=2, n_bytes=20),
    load_duration_counts=[10, 0, 5, *[0] * (N_BUCKETS - 4), 3],
    load_duration_seconds=4.5,
    read_seconds=3.5,
    evictions=8,
    prefetches_used=4,
    prefetches_late=3,
    prefetches_wasted=1,
    read_errors=2,
    gpu=GpuActivity(
        prefill=GpuPhase(
            demand=ExpertLoads(n_loads=1, n_bytes=10), requests=2, copy_seconds=0.5, synchronizations=3
        ),
        decode=GpuPhase(
            demand=ExpertLoads(n_loads=2, n_bytes=20), requests=4, copy_seconds=1.5, synchronizations=5
        ),
        prefetch=ExpertLoads(n_loads=4, n_bytes=40),
        evictions=5,
    ),
)


async def test_every_label_value_exists_at_zero(rig: ServerRig) -> None:
    phases = [{"phase": phase} for phase in ("prefill", "decode")]
    by_trigger = [
        {"source": source, "trigger": trigger}
        for source, trigger in product(("disk", "host"), ("demand", "prefetch", "warmup"))
    ]
    pools = [
        {"pool": pool, "device": "host"}
        for pool in ("weights", "kv", "compute", "expert_cache", "prompt_cache", "processes", "reserve")
    ]
    tier = [{"tier": tier} for tier in ("gpu", "pinned", "pageable")]
    expected: dict[str, list[dict[str, str]]] = {
        "expert_cache_lookups_total": [
            {"result": result, "phase": phase}
            for result, phase in product(("hit", "miss", "prefetched"), ("prefill", "decode"))
        ],
        "expert_cache_loads_total": by_trigger,
        "expert_cache_load_bytes_total": by_trigger,
        "expert_cache_load_duration_seconds_count": [{"source": "disk"}],
        "expert_cache_load_duration_seconds_sum": [{"source": "disk"}],
        "expert_cache_read_seconds_total": [{}],
        "expert_cache_stall_seconds_total": phases,
        "expert_cache_compute_seconds_total": phases,
        "expert_cache_evictions_total": [{"policy": policy} for policy in names.EVICTION_POLICIES],
        "expert_cache_prefetches_total": [{"outcome": o} for o in ("used", "late", "wasted")],
        "expert_cache_read_errors_total": [{}],
        "expert_cache_resident_experts": tier,
        "expert_cache_capacity_experts": tier,
        "expert_cache_resident_bytes": tier,
        "expert_cache_capacity_bytes": tier,
        "gpu_slot_evictions_total": [{}],
        "gpu_demand_bytes_total": phases,
        "gpu_host_requests_total": phases,
        "gpu_copy_seconds_total": phases,
        "gpu_synchronizations_total": phases,
        "memory_budget_bytes": pools,
        "memory_used_bytes": pools,
        "memory_available_bytes": [{"device": "host"}],
        "memory_total_bytes": [{"device": "host"}],
        "memory_pressure_events_total": [{"action": action} for action in names.PRESSURE_ACTIONS],
    }
    found = await samples(rig)
    for name, all_labels in expected.items():
        for labels in all_labels:
            assert found[(f"s2moe_{name}", tuple(sorted(labels.items())))] == 0


async def samples(rig: ServerRig) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = (await rig.http.get("/metrics")).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_each_increment_reaches_its_series(rig: ServerRig) -> None:
    rig.metrics.on_stats(EngineStats(experts=ACTIVITY, expert_cache=CACHE))
    rig.metrics.on_stats(EngineStats(experts=ACTIVITY, expert_cache=CACHE))
    expected: list[tuple[str, dict[str, str], float]] = [
        ("lookups_total", {"result": "hit", "phase": "prefill"}, 2),
        ("lookups_total", {"result": "miss", "phase": "prefill"}, 4),
        ("lookups_total", {"result": "prefetched", "phase": "prefill"}, 6),
        ("lookups_total", {"result": "hit", "phase": "decode"}, 8),
        ("lookups_total", {"result": "miss", "phase": "decode"}, 10),
        ("lookups_total", {"result": "prefetched", "phase": "decode"}, 12),
        ("loads_total", {"source": "disk", "trigger": "demand"}, 14),
        ("loads_total", {"source": "disk", "trigger": "prefetch"}, 18),
        ("loads_total", {"source": "disk", "trigger": "warmup"}, 4),
        ("load_bytes_total", {"source": "disk", "trigger": "demand"}, 140),
        ("load_bytes_total", {"source": "disk", "trigger": "prefetch"}, 180),
        ("load_bytes_total", {"source": "disk", "trigger": "warmup"}, 40),
        ("loads_total", {"source": "host", "trigger": "demand"}, 6),
        ("loads_total", {"source": "host", "trigger": "prefetch"}, 8),
        ("load_bytes_total", {"source": "host", "trigger": "demand"}, 60),
        ("load_bytes_total", {"source": "host", "trigger": "prefetch"}, 80),
        ("read_seconds_total", {}, 7),
        ("stall_seconds_total", {"phase": "prefill"}, 0.5),
        ("stall_seconds_total", {"phase": "decode"}, 2.5),
        ("compute_seconds_total", {"phase": "prefill"}, 1),
        ("compute_seconds_total", {"phase": "decode"}, 3),
        ("evictions_total", {"policy": "decayed_frequency"}, 16),
        ("prefetches_total", {"outcome": "used"}, 8),
        ("prefetches_total", {"outcome": "late"}, 6),
        ("prefetches_total", {"outcome": "wasted"}, 2),
        ("read_errors_total", {}, 4),
        ("resident_experts", {"tier": "pageable"}, 3),
        ("resident_bytes", {"tier": "pageable"}, 300),
        ("capacity_experts", {"tier": "pageable"}, 5),
        ("capacity_bytes", {"tier": "pageable"}, 500),
        ("info", {"io": "direct", "reader": "threads", "reason": ""}, 1),
        ("load_duration_seconds_sum", {"source": "disk"}, 9),
        ("load_duration_seconds_count", {"source": "disk"}, 36),
        ("load_duration_seconds_bucket", {"source": "disk", "le": "0.0001"}, 20),
        ("load_duration_seconds_bucket", {"source": "disk", "le": "0.00025"}, 20),
        ("load_duration_seconds_bucket", {"source": "disk", "le": "0.0005"}, 30),
        ("load_duration_seconds_bucket", {"source": "disk", "le": "1.0"}, 30),
        ("load_duration_seconds_bucket", {"source": "disk", "le": "+Inf"}, 36),
    ]
    found = await samples(rig)
    for name, labels, value in expected:
        assert found[(f"s2moe_expert_cache_{name}", tuple(sorted(labels.items())))] == value, (name, labels)
    assert found[("s2moe_gpu_slot_evictions_total", ())] == 10
    series = ("demand_bytes", "host_requests", "copy_seconds", "synchronizations")
    for phase, values in (("prefill", (20, 4, 1, 6)), ("decode", (40, 8, 3, 10))):
        for name, value in zip(series, values, strict=True):
            assert found[(f"s2moe_gpu_{name}_total", (("phase", phase),))] == value, (phase, name)


async def test_slots_of_a_gpu_are_a_tier(rig: ServerRig) -> None:
    slots = GpuSlots(resident_experts=7, resident_bytes=70, capacity_experts=8, capacity_bytes=80)
    cache = msgspec.structs.replace(CACHE, tier="pinned", gpu=slots)
    rig.metrics.on_stats(EngineStats(expert_cache=cache))
    found = await samples(rig)
    for tier, experts, n_bytes in (("gpu", 8, 80), ("pinned", 5, 500), ("pageable", 0, 0)):
        assert found[("s2moe_expert_cache_capacity_experts", (("tier", tier),))] == experts
        assert found[("s2moe_expert_cache_capacity_bytes", (("tier", tier),))] == n_bytes
    rig.metrics.on_state(EngineState.RESTARTING)
    found = await samples(rig)
    for tier in ("gpu", "pinned"):
        assert found[("s2moe_expert_cache_resident_experts", (("tier", tier),))] == 0


async def test_counters_stay_and_gauges_fall_when_the_engine_goes(rig: ServerRig) -> None:
    pools = [MemoryPool(pool="kv", budget_bytes=50, used_bytes=40)]
    stats = EngineStats(experts=ACTIVITY, expert_cache=CACHE, memory_pools=pools)
    rig.metrics.on_stats(stats)
    rig.metrics.on_state(EngineState.RESTARTING)
    demand = {"source": "disk", "trigger": "demand"}
    assert await rig.sample("s2moe_expert_cache_loads_total", **demand) == 7
    assert await rig.sample("s2moe_expert_cache_load_duration_seconds_count", source="disk") == 18
    assert await rig.sample("s2moe_expert_cache_resident_bytes", tier="pageable") == 0
    assert await rig.sample("s2moe_memory_used_bytes", pool="kv", device="host") == 0
    assert await rig.sample("s2moe_memory_budget_bytes", pool="kv", device="host") == 50
    # the next engine counts from zero
    rig.metrics.on_stats(stats)
    assert await rig.sample("s2moe_expert_cache_loads_total", **demand) == 14
    assert await rig.sample("s2moe_expert_cache_load_duration_seconds_count", source="disk") == 36


async def test_memory_is_shown_by_pool(rig: ServerRig) -> None:
    rig.metrics.on_stats(
        EngineStats(
            memory_pools=[
                MemoryPool(pool="kv", budget_bytes=50, used_bytes=40),
                MemoryPool(pool="expert_cache", budget_bytes=900, used_bytes=800),
                MemoryPool(pool="of-a-later-engine", budget_bytes=1, used_bytes=1),
            ],
            memory_available_bytes=1000,
            memory_total_bytes=4000,
            memory_pressure_events={"shrink_cache": 2, "of-a-later-engine": 1},
        )
    )
    assert await rig.sample("s2moe_memory_budget_bytes", pool="expert_cache", device="host") == 900
    assert await rig.sample("s2moe_memory_used_bytes", pool="expert_cache", device="host") == 800
    assert await rig.sample("s2moe_memory_used_bytes", pool="kv", device="host") == 40
    assert await rig.sample("s2moe_memory_available_bytes", device="host") == 1000
    assert await rig.sample("s2moe_memory_total_bytes", device="host") == 4000
    assert await rig.sample("s2moe_memory_pressure_events_total", action="shrink_cache") == 2
    assert "of-a-later-engine" not in (await rig.http.get("/metrics")).text


async def test_how_experts_are_read_is_one_series(rig: ServerRig) -> None:
    for reader, reason in (("io_uring", ""), ("threads", "io_uring_setup: Operation not permitted")):
        cache = msgspec.structs.replace(CACHE, reader=reader, reason=reason)
        rig.metrics.on_stats(EngineStats(expert_cache=cache))
    infos = [name for name in await samples(rig) if name[0] == "s2moe_expert_cache_info"]
    assert infos == [
        (
            "s2moe_expert_cache_info",
            (
                ("io", "direct"),
                ("reader", "threads"),
                ("reason", "io_uring_setup: Operation not permitted"),
            ),
        )
    ]


async def test_time_that_comes_out_below_zero_does_not_end_the_report(rig: ServerRig) -> None:
    decode = ExpertPhase(hits=1, compute_seconds=-1e-9)
    rig.metrics.on_stats(EngineStats(experts=ExpertActivity(decode=decode)))
    assert await rig.sample("s2moe_expert_cache_lookups_total", result="hit", phase="decode") == 1
    assert await rig.sample("s2moe_expert_cache_compute_seconds_total", phase="decode") == 0


def test_histogram_takes_whole_buckets_or_nothing() -> None:
    registry = CollectorRegistry()
    histogram = BucketHistogram("x_seconds", "text", (0.5, 2), {"source": ["disk", "host"]}, registry)
    histogram.add([1, 2, 3], 10.0, "disk")
    with pytest.raises(ValueError, match="zip"):
        histogram.add([1, 2], 1.0, "disk")
    with pytest.raises(KeyError):
        histogram.add([1, 2, 3], 1.0, "tape")
    text = generate_latest(registry).decode()
    assert text == (
        "# HELP x_seconds text\n"
        "# TYPE x_seconds histogram\n"
        'x_seconds_bucket{le="0.5",source="disk"} 1.0\n'
        'x_seconds_bucket{le="2.0",source="disk"} 3.0\n'
        'x_seconds_bucket{le="+Inf",source="disk"} 6.0\n'
        'x_seconds_count{source="disk"} 6.0\n'
        'x_seconds_sum{source="disk"} 10.0\n'
        'x_seconds_bucket{le="0.5",source="host"} 0.0\n'
        'x_seconds_bucket{le="2.0",source="host"} 0.0\n'
        'x_seconds_bucket{le="+Inf",source="host"} 0.0\n'
        'x_seconds_count{source="host"} 0.0\n'
        'x_seconds_sum{source="host"} 0.0\n'
    )
    with pytest.raises(ValueError, match="Duplicated"):
        BucketHistogram("x_seconds", "text", (0.5, 2), {}, registry)


# ── one answer's share ──


PREFILL = ExpertUse(n_lookups=100, n_misses=40, read_bytes=4000, stall_seconds=0.125)
DECODE = ExpertUse(n_lookups=80, n_misses=8, read_bytes=800, stall_seconds=0.0625)
EXPERT_TIMINGS = {
    "prompt_expert_lookups": 100,
    "prompt_expert_misses": 40,
    "prompt_expert_read_bytes": 4000,
    "prompt_expert_stall_ms": 125.0,
    "predicted_expert_lookups": 80,
    "predicted_expert_misses": 8,
    "predicted_expert_read_bytes": 800,
    "predicted_expert_stall_ms": 62.5,
}


def cached_answer(request: Generate) -> list[Any]:
    end = finished(request)
    timings = msgspec.structs.replace(end.timings, prefill_experts=PREFILL, decode_experts=DECODE)
    return [started(request), step(request, "Hello"), msgspec.structs.replace(end, timings=timings)]


def expert_keys(timings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in timings.items() if "expert" in key}


async def test_answer_says_what_it_asked_of_the_cache(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(cached_answer))
    timings = (await rig.post(chat())).json()["timings"]
    assert expert_keys(timings) == EXPERT_TIMINGS
    assert timings["predicted_per_second"] == 8.0
    assert set(timings) == set(TimingsSchema.model_fields) - {"draft_n", "draft_n_accepted"}
    last = chunks_of((await rig.post(chat(stream=True))).text)[-1]
    assert last["timings"] == timings


async def test_answer_without_a_cache_says_nothing_of_it(rig: ServerRig) -> None:
    assert expert_keys((await rig.post(chat())).json()["timings"]) == {}


async def test_answer_that_was_cut_in_prefill_has_only_that_share(start_server: StartServer) -> None:
    def script(request: Generate) -> list[Any]:
        timings = Timings(prefill_experts=PREFILL)
        return [started(request), Finished(request_id=request.request_id, reason="stop", timings=timings)]

    rig = await start_server(FakeEngine(script))
    timings = (await rig.post(chat())).json()["timings"]
    assert expert_keys(timings) == {
        key: value for key, value in EXPERT_TIMINGS.items() if key.startswith("prompt")
    }


# ── the page ──


async def test_page_lists_every_series_with_its_labels(rig: ServerRig) -> None:
    rig.metrics.on_stats(EngineStats(experts=ACTIVITY, expert_cache=CACHE))
    await rig.post(chat())
    text = (await rig.http.get("/metrics")).text
    exported: dict[str, tuple[str, set[str]]] = {}
    values: dict[tuple[str, str], set[str]] = {}
    for family in text_string_to_metric_families(text):
        # the client library's own, which not every system has all of
        if family.name.startswith(("s2moe_process_", "python_")):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        exported[name] = (family.type, set())
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le":
                    exported[name][1].add(label)
                    values.setdefault((name, label), set()).add(value)
    documented: dict[str, tuple[str, set[str]]] = {}
    rows = r"^\| `(s2moe_\w+)` \| (\w+) \| ([^|]*)\|"
    for name, kind, labels in re.findall(rows, PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        assert name not in documented
        documented[name] = (kind, set(re.findall(r"`(\w+)`", labels)))
        for label, fixed in re.findall(r"`(\w+)` \(([^)]*)\)", labels):
            assert set(fixed.split(", ")) == values[(name, label)], (name, label)
    assert documented == exported
