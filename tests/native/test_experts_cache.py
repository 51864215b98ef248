"""The cache's books: every lookup, byte and slot is accounted for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from s2moe.engine.native import Library, NativeError, Status
from s2moe.engine.native_experts import (
    Experts,
    ExpertStats,
    Phase,
    Priority,
    Trigger,
    context_memory,
)

from expert_models import EXPERT_MODELS, variant_of
from stored_model import PROMPT, Layout, StoredModel, lookups, resident_set, settle, transcribe

BOOKED = ["q4_k_m", "gpt-oss-odd", "deepseek2-v3-q4_k", "split-q4_k_m-3", "olmoe"]
"""Models of one and of two slot sizes, with dense layers, in one file and in several."""

BLOCKS_AROUND_EXPERT = 3 * 2 * 4095
"""Bytes read beside an expert's own, at most: its three matrices begin and end inside blocks of the drive."""


def looked_up(stats: ExpertStats, phase: Phase) -> int:
    """Each lookup has one of three results."""
    return stats.hits[phase] + stats.prefetched[phase] + stats.misses[phase]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", BOOKED)
def test_lookups_counts_and_bytes_add_up(
    name: str, share: float, open_model: Callable[..., StoredModel], expert_model: Callable[[str], Path]
) -> None:
    layout = Layout.of(expert_model(name))
    model = open_model(name, share)
    model.library.set_router_recording(model.context, True)
    model.decode(PROMPT, position=0)
    n_prefill = lookups(model.router_ids()).total()
    used: Counter[tuple[int, int]] = Counter()
    for i in range(40):
        model.decode([60 + i], position=len(PROMPT) + i)
        used += lookups(model.router_ids())
    settle(model.experts)

    stats = model.experts.stats()
    assert looked_up(stats, Phase.PREFILL) == n_prefill
    assert (
        looked_up(stats, Phase.DECODE)
        == used.total()
        == 40 * len(model.experts.layers) * variant_of(name).n_expert_used
    )
    counts = model.experts.counts()
    for row, layer in zip(counts, model.experts.layers, strict=True):
        assert row == [used[layer, expert] for expert in range(len(row))]
    assert stats.loads[Trigger.DEMAND] == sum(stats.misses)
    assert stats.loads[Trigger.WARMUP] == 0
    assert sum(stats.load_duration_counts) == sum(stats.loads)
    assert sum(stats.loads) - stats.evictions == stats.resident_experts
    if share == 1:
        assert stats.evictions == 0
        assert stats.resident_experts == sum(stats.loads)
        by_layer = Counter(layer for layer, _ in resident_set(model.experts))
        n_bytes = sum(layout.expert_bytes[layer] * n for layer, n in by_layer.items())
        assert n_bytes <= sum(stats.load_bytes) <= n_bytes + BLOCKS_AROUND_EXPERT * sum(stats.loads)
    else:
        assert stats.evictions > 0
    smallest, largest = min(layout.expert_bytes.values()), max(layout.expert_bytes.values())
    for loads, n_bytes in zip(stats.loads, stats.load_bytes, strict=True):
        assert smallest * loads <= n_bytes <= (largest + BLOCKS_AROUND_EXPERT) * loads
    assert stats.read_seconds > 0
    assert stats.load_duration_seconds > 0
    assert all(seconds > 0 for seconds in stats.compute_seconds)
    assert stats.read_errors == 0


@pytest.mark.parametrize("name", BOOKED)
def test_nothing_is_missed_when_everything_is_resident(
    name: str, open_model: Callable[..., StoredModel]
) -> None:
    model = open_model(name, 1.0)
    everything = [
        (layer, expert) for layer in model.experts.layers for expert in range(model.experts.n_experts)
    ]
    assert model.experts.prefetch(everything, Priority.WARMUP) == len(everything)
    settle(model.experts)
    assert resident_set(model.experts) == set(everything)
    transcribe(model)
    stats = model.experts.stats()
    assert sum(stats.misses) == 0
    assert sum(stats.hits) > 0
    assert sum(stats.prefetched) == 0
    assert list(stats.loads) == [0, 0, len(everything)]
    assert stats.resident_experts == stats.capacity_experts == len(everything)
    assert stats.resident_bytes == stats.capacity_bytes


@pytest.mark.parametrize("name", BOOKED)
def test_capacity_is_never_exceeded(
    name: str, open_model: Callable[..., StoredModel], expert_model: Callable[[str], Path]
) -> None:
    path = expert_model(name)
    layout = Layout.of(path)
    model = open_model(name, 0.0)
    floor = model.experts.floor_bytes
    largest = max(each["slot_bytes"] for each in layout.document["classes"])
    for capacity in np.linspace(floor, layout.full_bytes, 5, dtype=np.int64):
        model.experts.allocate(int(capacity))
        seen: list[tuple[int, int]] = []
        done = threading.Event()

        def watch(seen: list[tuple[int, int]] = seen, done: threading.Event = done) -> None:
            while not done.is_set():
                stats = model.experts.stats()
                seen.append((stats.resident_bytes, stats.capacity_bytes))
                time.sleep(0.0005)

        watcher = threading.Thread(target=watch)
        watcher.start()
        transcribe(model)
        done.set()
        watcher.join()
        slots = seen[-1][1]
        assert all(resident <= slots for resident, _ in seen)
        assert capacity - largest < slots <= capacity


def test_below_the_floor_is_refused(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("q4_k_m", 0.5)
    before = model.experts.stats().capacity_bytes
    with pytest.raises(NativeError) as refusal:
        model.experts.allocate(model.experts.floor_bytes - 1)
    assert refusal.value.status == Status.INVALID
    assert str(model.experts.floor_bytes) in refusal.value.message or "floor" in refusal.value.message
    assert model.experts.stats().capacity_bytes == before
    transcribe(model)


def test_floor_holds_the_largest_layer_of_every_class(expert_model: Callable[[str], Path]) -> None:
    for name in ("q4_0", "q4_k_m"):
        path = expert_model(name)
        layout = Layout.of(path)
        experts = Experts(Library(), path)
        slots = [each["slot_bytes"] for each in layout.document["classes"]]
        assert experts.floor_bytes == sum(slots) * EXPERT_MODELS[name].n_expert
        experts.close()


def test_decoding_without_slots_is_an_error(expert_model: Callable[[str], Path]) -> None:
    with StoredModel(expert_model("q4_0"), allocate=False) as model:
        with pytest.raises(NativeError):
            model.decode([5], position=0)
        model.experts.allocate(model.experts.floor_bytes)
        transcribe(model)


def test_allocating_anew_forgets(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("q4_k_m", 1.0)
    transcript = transcribe(model)
    assert model.experts.stats().resident_experts > 0
    model.experts.allocate(model.experts.floor_bytes)
    stats = model.experts.stats()
    assert stats.resident_experts == stats.resident_bytes == 0
    assert resident_set(model.experts) == set()
    assert transcribe(model) == transcript


def test_shrinking_gives_slots_back(
    open_model: Callable[..., StoredModel], expert_model: Callable[[str], Path]
) -> None:
    model = open_model("q4_k_m", 1.0)
    transcript = transcribe(model)
    before = model.experts.stats()
    floor = model.experts.floor_bytes
    target = (before.capacity_bytes + floor) // 2
    taken = model.experts.shrink(target)
    stats = model.experts.stats()
    assert floor <= taken <= target
    assert stats.capacity_bytes == taken
    assert stats.resident_bytes <= taken
    assert len(resident_set(model.experts)) == stats.resident_experts > 0
    assert transcribe(model) == transcript
    assert model.experts.shrink(0) == model.experts.stats().capacity_bytes >= floor
    assert transcribe(model) == transcript


# ── the trace, costs and other measurements ─────────────────────────────────────────────────────


def test_trace_tells_each_layer_of_each_decode(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("deepseek2-v3-q4_k", 0.2)
    layers = list(model.experts.layers)
    model.experts.set_trace(1000)
    began = time.monotonic_ns()
    transcribe(model, n_tokens=10)
    records = model.experts.take_trace(1000)
    assert [record.layer for record in records] == layers * 11
    assert [record.n_tokens for record in records[len(layers) :]] == [1] * 10 * len(layers)
    assert records[0].n_tokens == len(PROMPT)
    times = [record.begin_ns for record in records]
    assert began <= times[0]
    assert times == sorted(times)
    assert times[-1] <= time.monotonic_ns()
    stats = model.experts.stats()
    assert sum(record.n_hits for record in records) == sum(stats.hits) + sum(stats.prefetched)
    assert sum(record.n_misses for record in records) == sum(stats.misses)
    missed = sum(record.missed_bytes for record in records)
    around = BLOCKS_AROUND_EXPERT * stats.loads[Trigger.DEMAND]
    assert 0 < missed <= stats.load_bytes[Trigger.DEMAND] <= missed + around
    assert sum(record.stall_seconds for record in records) == pytest.approx(sum(stats.stall_seconds))
    assert sum(record.compute_seconds for record in records) == pytest.approx(sum(stats.compute_seconds))
    assert model.experts.take_trace(1000) == []

    model.experts.set_trace(5)
    transcribe(model, n_tokens=10)
    assert [record.layer for record in model.experts.take_trace(2)] == (layers * 11)[-5:-3]
    assert [record.layer for record in model.experts.take_trace(100)] == (layers * 11)[-3:]
    model.experts.set_trace(0)
    transcribe(model, n_tokens=2)
    assert model.experts.take_trace(100) == []


def test_costs_are_learned(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("f16", 0.0)
    assert model.experts.costs().bytes_per_second == 0
    transcribe(model)
    settle(model.experts)
    costs = model.experts.costs()
    assert 0 < costs.hit_seconds < 0.1
    assert 0 < costs.miss_seconds < 1
    assert 1e6 < costs.bytes_per_second < 1e12
    assert costs.queued_seconds == 0


def test_measuring_the_drive_disturbs_nothing(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("q4_k_m", 0.5)
    transcript = transcribe(model)
    settle(model.experts)
    before, residents = model.experts.stats(), resident_set(model.experts)
    assert 1e6 < model.experts.measure(4 << 20) < 1e12
    after = model.experts.stats()
    assert resident_set(model.experts) == residents
    assert list(after.loads) == list(before.loads)
    assert transcribe(model) == transcript


def test_context_memory_leaves_the_experts_out(expert_model: Callable[[str], Path]) -> None:
    path = expert_model("f16")
    document = Layout.of(path).document
    with StoredModel(path) as model:
        memory = context_memory(model.library, model.context)
    assert document["dense_bytes"] <= memory.weights_bytes <= document["dense_bytes"] + (64 << 10)
    assert memory.kv_bytes >= 2 * 2 * 128 * EXPERT_MODELS["f16"].n_layer * EXPERT_MODELS["f16"].n_head_kv * 64
    assert memory.compute_bytes > 0
