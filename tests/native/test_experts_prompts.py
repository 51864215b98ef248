"""A prompt that uses nearly all experts is read ahead of, and does not make the cache forget an answer's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from s2moe.engine.native_experts import Phase

from gguf_factory import ARCHITECTURES, ExpertTypes, write_random_model
from stored_model import Layout, StoredModel, lookups, resident_set, settle

_Q4_0 = gguf.GGMLQuantizationType.Q4_0
VARIANT = replace(
    ARCHITECTURES["qwen3moe"], n_layer=6, n_expert=32, n_expert_used=4, n_embd=256, n_ff=256, n_ff_exp=128,
    expert_types=(ExpertTypes(_Q4_0, _Q4_0),),
)  # fmt: skip
N_ALL = VARIANT.n_layer * VARIANT.n_expert
LONG_PROMPT = [(10 + 7 * i) % 280 for i in range(300)]
TEXT = [65] * 40
"""One token over and over, as the most skewed router would have it: each layer keeps to a few experts."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.gguf"
    write_random_model(path, VARIANT)
    return path


@pytest.fixture(scope="module")
def expected(path: Path) -> npt.NDArray[np.float32]:
    """Logits of LONG_PROMPT with every expert resident."""
    with StoredModel(path, Layout.of(path).full_bytes, n_ctx=512) as model:
        model.decode(LONG_PROMPT, position=0)
        model.clear()
        return model.decode(LONG_PROMPT, position=0)


@pytest.fixture
def model(path: Path) -> Iterator[StoredModel]:
    with StoredModel(path, n_ctx=512) as model:
        yield model


@pytest.mark.parametrize("n_slots", [2 * VARIANT.n_expert, N_ALL // 2])
def test_layers_are_read_ahead_of_a_prompt(
    n_slots: int, model: StoredModel, expected: npt.NDArray[np.float32]
) -> None:
    """The floor is one layer; with a second one, or with half of all, the next layer has where to go."""
    assert model.experts.stats().capacity_experts == VARIANT.n_expert
    model.experts.allocate(model.experts.floor_bytes // VARIANT.n_expert * n_slots)
    assert model.experts.stats().capacity_experts == n_slots
    for _ in range(2):
        model.clear()
        assert model.decode(LONG_PROMPT, position=0).tobytes() == expected.tobytes()
    stats = model.experts.stats()
    n_lookups = stats.hits[Phase.PREFILL] + stats.misses[Phase.PREFILL] + stats.prefetched[Phase.PREFILL]
    # but for the first layer, and the last, which computes as many tokens as logits are wanted
    assert n_lookups > 2 * 0.9 * N_ALL
    assert stats.prefetched[Phase.PREFILL] > 0.5 * n_lookups
    assert stats.prefetched[Phase.PREFILL] <= stats.prefetches_used + stats.prefetches_late


def test_a_prompt_at_the_floor_has_nowhere_to_read_ahead(
    model: StoredModel, expected: npt.NDArray[np.float32]
) -> None:
    """A read-ahead that took the slots of the layer that is computed would never end."""
    for _ in range(2):
        model.clear()
        assert model.decode(LONG_PROMPT, position=0).tobytes() == expected.tobytes()


def answer(model: StoredModel) -> tuple[int, set[tuple[int, int]]]:
    """Decodes TEXT from an empty KV cache. Returns the number of misses, and the experts used."""
    model.clear()
    n_before = model.experts.stats().misses[Phase.DECODE]
    used: set[tuple[int, int]] = set()
    for i, token in enumerate(TEXT):
        model.decode([token], position=i)
        used |= set(lookups(model.router_ids()))
    settle(model.experts)
    return model.experts.stats().misses[Phase.DECODE] - n_before, used


def test_a_prompt_does_not_wash_out_what_an_answer_needs(model: StoredModel) -> None:
    """Of the experts used last, the slots would hold those of the prompt's last two or three layers."""
    model.experts.allocate(model.experts.floor_bytes * 5 // 2)
    assert model.experts.stats().capacity_experts == 2.5 * VARIANT.n_expert < N_ALL / 2
    model.library.set_router_recording(model.context, True)
    n_first, used = answer(model)
    n_learned, _ = answer(model)
    assert n_first == len(used)
    assert n_learned == 0

    model.clear()
    before = model.experts.stats()
    model.decode(LONG_PROMPT, position=0)
    assert len(lookups(model.router_ids())) > 0.9 * N_ALL
    settle(model.experts)
    stats = model.experts.stats()
    assert stats.evictions - before.evictions > N_ALL / 2
    assert len(used & resident_set(model.experts)) >= 0.8 * len(used)
    n_misses, _ = answer(model)
    assert n_misses <= 0.2 * len(used)
