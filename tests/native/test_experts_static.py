"""The policy "static": a fixed hot list stays, every other expert is read for one layer's pass."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import pytest

from s2moe.engine.native import AbortSwitch, Library, NativeError, Status
from s2moe.engine.native_experts import Experts, Phase, Policy, Priority, Trigger

from expert_models import variant_of
from stored_model import PROMPT, Layout, StoredModel, lookups, resident_set, settle, transcribe

MODELS = ["q4_k_m", "deepseek2-v3-q4_k", "gpt-oss-odd", "split-q4_k_m-3"]
"""Of one and of two slot sizes, with a dense layer, in one file and in several."""

Pairs = set[tuple[int, int]]
OpenStatic = Callable[[str, float], StoredModel]


@pytest.fixture
def open_static(expert_model: Callable[[str], Path]) -> Iterator[OpenStatic]:
    """(name, share of the bytes between floor and everything) -> StoredModel with an empty cache."""
    opened: list[StoredModel] = []

    def open_at(name: str, share: float) -> StoredModel:
        path = expert_model(name)
        model = StoredModel(path, policy="static")
        opened.append(model)
        floor = model.experts.floor_bytes
        model.experts.allocate(floor + int(share * (Layout.of(path).full_bytes - floor)))
        return model

    yield open_at
    for model in opened:
        model.close()


def table_of(experts: Experts) -> list[list[int]]:
    """Every expert has its own number of uses, larger ones more in even layers, smaller ones in odd."""
    n = experts.n_experts
    return [[1 + (e if row % 2 == 0 else n - e) ** 2 for e in range(n)] for row in range(len(experts.layers))]


def expected_hot(model: StoredModel, table: list[list[int]]) -> Pairs:
    """The most used by their share of a layer's uses, as far as slots go beyond one layer. Of one class."""
    experts = model.experts
    ranked = sorted(
        (-count / sum(row), layer, expert)
        for row, layer in zip(table, experts.layers, strict=True)
        for expert, count in enumerate(row)
    )
    n_hot = experts.stats().capacity_experts - experts.n_experts
    return {(layer, expert) for _, layer, expert in ranked[:n_hot]}


def warm(model: StoredModel) -> Pairs:
    """Fills the cache; returns what is hot then."""
    model.experts.warm(table_of(model.experts))
    settle(model.experts)
    return resident_set(model.experts)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_the_cache(
    name: str, share: float, open_static: OpenStatic, open_model: Callable[..., StoredModel]
) -> None:
    expected = transcribe(open_model(name, share))
    model = open_static(name, share)
    cold = transcribe(model)
    assert cold == expected, cold.difference(expected)
    model.experts.warm(table_of(model.experts))
    for width in (len(PROMPT), 5):  # the first while the list is being read
        found = transcribe(model, width=width)
        wanted = expected if width == len(PROMPT) else transcribe(open_model(name, share), width=width)
        assert found == wanted, found.difference(wanted)


@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize("name", ["deepseek2-v3-q4_k", "gpt-oss-odd", "olmoe"])
def test_the_most_used_fill_all_slots_but_those_of_one_layer(
    name: str, share: float, open_static: OpenStatic
) -> None:
    model = open_static(name, share)
    hot = warm(model)
    stats = model.experts.stats()
    assert hot == expected_hot(model, table_of(model.experts))
    assert len(hot) == stats.resident_experts == stats.capacity_experts - model.experts.n_experts > 0
    assert list(stats.loads) == [0, 0, len(hot)]


@pytest.mark.parametrize("name", MODELS)
def test_nothing_but_the_hot_list_outlives_its_layer(name: str, open_static: OpenStatic) -> None:
    model = open_static(name, 0.5)
    hot = warm(model)
    assert hot
    loads_before = model.experts.stats().loads[Trigger.WARMUP]
    model.library.set_router_recording(model.context, True)
    misses: Counter[Phase] = Counter()
    hits: Counter[Phase] = Counter()
    for begin, tokens in enumerate([PROMPT, *([60 + i] for i in range(30))]):
        phase = Phase.DECODE if begin else Phase.PREFILL
        model.decode(tokens, position=0 if begin == 0 else len(PROMPT) + begin - 1)
        assert resident_set(model.experts) == hot
        for pair, n in lookups(model.router_ids()).items():
            (hits if pair in hot else misses)[phase] += n
    stats = model.experts.stats()
    for phase in Phase:
        assert stats.misses[phase] == misses[phase] > 0
        assert stats.hits[phase] == hits[phase] > 0
        assert stats.prefetched[phase] == 0
    assert list(stats.loads) == [misses.total(), 0, loads_before], "each miss is a read, and nothing else is"
    assert sum(stats.load_duration_counts) == sum(stats.loads)
    assert stats.evictions == 0
    assert stats.resident_experts == len(hot)


@pytest.mark.parametrize("name", MODELS)
def test_where_every_expert_has_a_slot_all_stay(name: str, open_static: OpenStatic) -> None:
    model = open_static(name, 1.0)
    hot = warm(model)
    stats = model.experts.stats()
    assert len(hot) == stats.capacity_experts == stats.resident_experts
    transcribe(model)
    assert sum(model.experts.stats().misses) == 0


@pytest.mark.parametrize("name", MODELS)
def test_at_the_floor_or_without_a_list_nothing_stays(name: str, open_static: OpenStatic) -> None:
    at_floor = open_static(name, 0.0)
    assert warm(at_floor) == set()
    cold = open_static(name, 0.5)
    for model in (at_floor, cold):
        transcribe(model)
        stats = model.experts.stats()
        assert resident_set(model.experts) == set()
        assert stats.resident_experts == stats.resident_bytes == stats.evictions == sum(stats.hits) == 0
        assert stats.loads[Trigger.DEMAND] == sum(stats.misses) > 0


def test_nothing_is_read_ahead_or_on_request(open_static: OpenStatic) -> None:
    model = open_static("q4_k_m", 0.5)
    hot = warm(model)
    loads = list(model.experts.stats().loads)
    everything = [(layer, e) for layer in model.experts.layers for e in range(model.experts.n_experts)]
    for priority in Priority:
        assert model.experts.prefetch(everything, priority) == 0
    settle(model.experts)
    assert resident_set(model.experts) == hot
    assert list(model.experts.stats().loads) == loads
    transcribe(model)  # its prompt uses most experts of each layer
    assert model.experts.stats().loads[Trigger.PREFETCH] == 0
    with pytest.raises(NativeError) as refused:
        model.experts.prefetch([(0, model.experts.n_experts)])
    assert refused.value.status == Status.INVALID


def test_what_is_hot_stays_whatever_is_asked(open_static: OpenStatic) -> None:
    model = open_static("olmoe", 0.5)
    hot = warm(model)
    model.experts.warm([row[::-1] for row in table_of(model.experts)])
    model.experts.pin([])
    settle(model.experts)
    assert resident_set(model.experts) == hot
    model.experts.warm(table_of(model.experts))
    assert model.experts.cancel_prefetches() == 0
    transcribe(model)
    assert resident_set(model.experts) == hot


def test_a_list_that_comes_during_decodes_is_filled(open_static: OpenStatic) -> None:
    model = open_static("q4_k_m", 0.6)
    expected = transcribe(model)
    for _ in range(5):
        model.experts.allocate(model.experts.stats().capacity_bytes)
        warming = threading.Thread(target=model.experts.warm, args=(table_of(model.experts),))
        warming.start()
        assert transcribe(model) == expected
        warming.join()
        settle(model.experts)
        transcribe(model, n_tokens=1)  # what was in a scratch slot when the list came
        settle(model.experts)
        stats = model.experts.stats()
        n_classes = len(Layout(model.experts.layout).document["classes"])
        assert stats.resident_experts == stats.capacity_experts - n_classes * model.experts.n_experts


@pytest.mark.parametrize("name", MODELS)
def test_shrinking_takes_the_least_used_and_leaves_room_for_a_layer(
    name: str, open_static: OpenStatic
) -> None:
    model = open_static(name, 1.0)
    expected = transcribe(model)
    hot = warm(model)
    n_classes = len(Layout(model.experts.layout).document["classes"])
    before = model.experts.stats()
    floor = model.experts.floor_bytes
    target = (before.capacity_bytes + floor) // 2
    assert floor <= model.experts.shrink(target) <= target
    left = resident_set(model.experts)
    stats = model.experts.stats()
    assert left < hot
    assert len(left) == stats.resident_experts == stats.capacity_experts - n_classes * model.experts.n_experts
    assert stats.evictions == len(hot) - len(left)
    assert transcribe(model) == expected
    assert resident_set(model.experts) == left
    assert model.experts.shrink(0) == floor
    assert transcribe(model) == expected
    assert resident_set(model.experts) == set()


def test_allocating_anew_forgets_the_list(open_static: OpenStatic) -> None:
    model = open_static("olmoe", 0.5)
    assert warm(model)
    model.experts.allocate(model.experts.stats().capacity_bytes)
    transcribe(model)
    assert resident_set(model.experts) == set()


def test_an_aborted_decode_leaves_nothing_but_the_hot_list(open_static: OpenStatic) -> None:
    model = open_static("q4_k_m", 0.4)
    expected = transcribe(model)
    hot = warm(model)
    switch = AbortSwitch(model.library, model.context)
    n_aborted = 0
    for microseconds in range(0, 8000, 100):
        model.clear()
        timer = threading.Timer(microseconds / 1e6, switch.request)
        timer.start()
        try:
            model.decode(PROMPT, position=0)
        except NativeError as error:
            n_aborted += error.status == Status.ABORTED
        timer.join()
        switch.clear()
        assert resident_set(model.experts) == hot
    settle(model.experts)
    assert n_aborted > 0
    assert transcribe(model) == expected
    stats = model.experts.stats()
    assert resident_set(model.experts) == hot
    assert (stats.evictions, stats.resident_experts) == (0, len(hot))
    llama_cpp.llama_set_abort_callback(model.context, llama_cpp.ggml_abort_callback(0), None)
    switch.close()


def test_counts_go_on(open_static: OpenStatic) -> None:
    model = open_static("q4_k_m", 0.3)
    warm(model)
    transcribe(model, n_tokens=10)
    for row in model.experts.counts():
        assert sum(row) == 10 * variant_of("q4_k_m").n_expert_used


def test_an_unknown_policy_is_refused(expert_model: Callable[[str], Path]) -> None:
    unknown: Policy = "lru"  # type: ignore[assignment]
    with pytest.raises(NativeError) as refused:
        Experts(Library(), expert_model("q4_0"), policy=unknown)
    assert refused.value.status == Status.INVALID
    assert 'policy is "lru"' in refused.value.message
