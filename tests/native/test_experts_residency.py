"""What is in the cache can be asked for, ordered, kept and given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from ctypes import c_uint8
from pathlib import Path

import numpy as np
import pytest

from s2moe.engine.native import Library, NativeError, Status
from s2moe.engine.native_experts import Experts, Phase, Priority, Trigger

from stored_model import PROMPT, StoredModel, lookups, resident_set, settle, transcribe


def test_residency_is_what_the_last_decodes_left(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("q4_k_m", 1.0)
    assert resident_set(model.experts) == set()
    model.library.set_router_recording(model.context, True)
    used: set[tuple[int, int]] = set()
    for i, token in enumerate(PROMPT[:5]):
        model.decode([token], position=i)
        used |= set(lookups(model.router_ids()))
    settle(model.experts)
    assert resident_set(model.experts) == used


def test_residency_refuses_what_is_not_there(expert_model: Callable[[str], Path]) -> None:
    library = Library()
    experts = Experts(library, expert_model("deepseek2-lite"))
    mask = (c_uint8 * 64)()
    for layer, n_expert in ((0, 16), (-1, 16), (3, 16), (1, 15), (1, 17), (2, 0), (2, -1)):
        with pytest.raises(NativeError) as refusal:
            library.check(library._lib.s2moe_experts_residency(experts.handle, layer, mask, n_expert))
        assert refusal.value.status == Status.INVALID
    assert bytes(mask) == bytes(64)
    experts.close()


def test_prefetched_experts_are_found(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("q4_k_m", 1.0)
    model.library.set_router_recording(model.context, True)
    model.decode([7], position=0)
    used = lookups(model.router_ids())
    model.clear()
    model.experts.allocate(model.experts.stats().capacity_bytes)
    before = model.experts.stats()

    unused = next((layer, e) for layer in model.experts.layers for e in range(12) if (layer, e) not in used)
    assert model.experts.prefetch([*used, unused]) == len(used) + 1
    settle(model.experts)
    assert resident_set(model.experts) == {*used, unused}
    assert model.experts.prefetch(used) == len(used)  # what is there counts as done
    model.decode([7], position=0)
    stats = model.experts.stats()
    assert stats.loads[Trigger.PREFETCH] - before.loads[Trigger.PREFETCH] == len(used) + 1
    assert list(stats.misses) == list(before.misses)
    assert stats.prefetched[Phase.DECODE] - before.prefetched[Phase.DECODE] == len(used)
    assert list(stats.hits) == list(before.hits)
    assert stats.prefetches_used - before.prefetches_used == len(used)
    assert stats.prefetches_wasted == before.prefetches_wasted

    model.clear()
    model.decode([7], position=0)
    again = model.experts.stats()
    assert again.prefetches_used == stats.prefetches_used  # a prefetch is used once
    assert again.prefetched[Phase.DECODE] == stats.prefetched[Phase.DECODE]


def test_prefetches_that_nobody_uses_are_wasted(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("q4_0", 0.0)
    n_slots = model.experts.stats().capacity_experts
    last = model.experts.layers[-1]
    assert model.experts.prefetch([(last, expert) for expert in range(12)]) == min(12, n_slots)
    settle(model.experts)
    model.library.set_router_recording(model.context, True)
    for i in range(30):
        model.decode([60 + i], position=i)
    stats = model.experts.stats()
    assert stats.prefetches_used + stats.prefetches_late + stats.prefetches_wasted <= 12
    assert stats.prefetches_wasted > 0


def test_prefetched_experts_outlive_the_next_decode(open_model: Callable[..., StoredModel]) -> None:
    """Whoever prefetches knows more than the history, in which these experts have no place."""
    tokens = [60, 63, 66, 69, 72]
    model = open_model("q4_0", 0.0)
    model.library.set_router_recording(model.context, True)
    routes = []
    for i, token in enumerate(tokens):
        model.decode([token], position=i)
        routes.append(set(lookups(model.router_ids())))
    strangers = [(0, e) for e in range(12) if not any((0, e) in used for used in routes)][:2]
    assert strangers, "every expert of the layer has a history"

    model = open_model("q4_0", 0.0)
    for i, token in enumerate(tokens[:-1]):
        model.decode([token], position=i)
    settle(model.experts)
    assert model.experts.stats().resident_experts == model.experts.stats().capacity_experts
    assert model.experts.prefetch(strangers) == len(strangers)
    settle(model.experts)
    before = model.experts.stats()
    model.decode([tokens[-1]], position=len(tokens) - 1)
    stats = model.experts.stats()
    assert stats.misses[Phase.DECODE] - before.misses[Phase.DECODE] >= 3
    assert set(strangers) <= resident_set(model.experts)
    assert stats.prefetches_wasted == before.prefetches_wasted


@pytest.mark.parametrize("pair", [(0, -1), (0, 12), (-1, 0), (4, 0), (99, 0)])
def test_ids_out_of_range_are_refused_whole(
    pair: tuple[int, int], open_model: Callable[..., StoredModel]
) -> None:
    model = open_model("q4_k_m", 1.0)
    for call in (model.experts.prefetch, model.experts.pin):
        with pytest.raises(NativeError) as refusal:
            call([(0, 1), pair])
        assert refusal.value.status == Status.INVALID
    settle(model.experts)
    assert resident_set(model.experts) == set()


def test_pinned_experts_survive(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("q4_0", 0.0)
    pins = {(0, 1), (1, 2), (2, 3)}

    def churn() -> None:
        model.clear()
        for i in range(40):
            model.decode([60 + 3 * i], position=i)

    model.experts.prefetch(pins)
    settle(model.experts)
    model.experts.pin(pins)
    churn()
    assert pins <= resident_set(model.experts)
    model.decode(PROMPT, position=40)  # all slots are needed by a layer: pins give way, the prompt does not
    model.experts.pin([])
    model.experts.prefetch(pins)
    settle(model.experts)
    for _ in range(3):
        churn()
    assert not pins <= resident_set(model.experts)


def test_shrinking_keeps_pinned_experts(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("q4_0", 1.0)
    experts = model.experts
    experts.prefetch([(layer, expert) for layer in experts.layers for expert in range(12)], Priority.WARMUP)
    settle(experts)
    for i in range(30):
        model.decode([60 + i], position=i)
    by_use = sorted(
        (n_used, layer, expert)
        for layer, row in zip(experts.layers, experts.counts(), strict=True)
        for expert, n_used in enumerate(row)
    )
    least_used = {(layer, expert) for _, layer, expert in by_use[:8]}
    experts.pin(least_used)
    assert experts.shrink(experts.floor_bytes) == experts.floor_bytes
    assert least_used <= resident_set(experts)
    assert experts.stats().capacity_experts == len(resident_set(experts)) == 12
    transcribe(model)


def test_shrinking_takes_pinned_experts_when_there_are_no_others(
    open_model: Callable[..., StoredModel],
) -> None:
    model = open_model("q4_0", 1.0)
    experts = model.experts
    everything = [(layer, expert) for layer in experts.layers for expert in range(12)]
    experts.prefetch(everything)
    settle(experts)
    experts.pin(everything)
    assert experts.shrink(experts.floor_bytes) == experts.floor_bytes
    assert len(resident_set(experts)) == 12
    transcribe(model)


# ── warm-up ─────────────────────────────────────────────────────────────────────────────────────


def test_warm_up_fills_with_the_most_used(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("q4_0", 0.3)
    n_slots = model.experts.stats().capacity_experts
    random = np.random.default_rng(0)
    counts = random.permutation(np.arange(1, 3 * 12 + 1)).reshape(3, 12)
    model.experts.warm(counts.tolist())
    deadline = time.monotonic() + 20
    while model.experts.stats().resident_experts < n_slots:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    rates = counts / counts.sum(axis=1, keepdims=True)  # every layer is looked up equally often
    best = np.argwhere(rates >= np.sort(rates.ravel())[-n_slots])
    assert resident_set(model.experts) == {(int(layer), int(expert)) for layer, expert in best}
    stats = model.experts.stats()
    assert list(stats.loads) == [0, 0, n_slots]
    assert stats.evictions == 0


def test_warm_up_takes_only_empty_slots(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("q4_0", 0.0)
    transcribe(model)
    settle(model.experts)
    full = resident_set(model.experts)
    model.experts.warm([[1] * 12] * 3)
    assert model.experts.prefetch([(0, e) for e in range(12)], Priority.WARMUP) <= len(full)
    settle(model.experts)
    assert resident_set(model.experts) == full
    assert model.experts.stats().loads[Trigger.WARMUP] == 0


def test_warm_up_refuses_another_shape(open_model: Callable[..., StoredModel]) -> None:
    model = open_model("q4_0", 0.0)
    for shape in ((3, 11), (2, 12), (4, 12), (0, 0)):
        with pytest.raises(NativeError) as refusal:
            model.experts.warm(np.ones(shape, np.int64).tolist())
        assert refusal.value.status == Status.INVALID


def test_a_request_during_warm_up_is_right(
    open_model: Callable[..., StoredModel],
) -> None:
    expected = transcribe(open_model("f16", 1.0))
    model = open_model("f16", 1.0)
    model.experts.warm([[1] * 12] * 3)
    assert transcribe(model) == expected


def test_asking_while_decoding(open_model: Callable[..., StoredModel]) -> None:
    """The functions marked [any thread], beside decodes."""
    expected = transcribe(open_model("q4_k_m", 1.0))
    model = open_model("q4_k_m", 0.3)
    experts = model.experts
    done = threading.Event()
    failures: list[BaseException] = []

    def ask(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            while not done.is_set():
                pairs = [(int(random.integers(4)), int(random.integers(12))) for _ in range(4)]
                experts.prefetch(pairs, Priority(int(random.integers(1, 3))))
                experts.pin(pairs[:2])
                experts.stats()
                experts.costs()
                for layer in experts.layers:
                    experts.residency(layer)
                experts.cancel_prefetches()
                experts.reader()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            assert transcribe(model) == expected
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures
