"""Drafting reads nothing: it makes do with experts in memory. Verification reads what it misses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from s2moe.engine.native_experts import ExpertTrace, Phase, Trigger

from expert_models import variant_of
from speculation_model import ADAPTIVE, EXACT, Run, SpeculationModel, last_positions
from stored_model import PROMPT, resident_set, settle

pytestmark = pytest.mark.usefixtures("batch_invariance")

DRAFTS = {"forced": EXACT, "adaptive": ADAPTIVE}
N_STEPS = 12
MODELS = ["q4_k_m", "q4_0", "gpt-oss-mxfp4", "deepseek2-v3-q4_k", "olmoe"]
SHARES = (0, 0.3)
"""Of the cache. Its floor holds one layer, so that every decode evicts."""


@dataclass
class StepReads:
    """What one step read, and for whom."""

    verified: list[ExpertTrace]
    """Layers of the target's evaluation. The cache traces none of the draft's, but counts their reads too."""
    n_loads: int
    """Experts read on demand, by the counters of the cache."""
    n_prefetched: int

    @property
    def n_missed(self) -> int:
        """Experts that the verification did not find, and had read."""
        return sum(record.n_misses for record in self.verified)


def trace_steps(model: SpeculationModel, options: dict[str, Any], n_steps: int = N_STEPS) -> list[StepReads]:
    experts = model.experts
    n_layers = len(experts.layers)
    run = Run(model, PROMPT, options)
    steps = []
    for _ in range(n_steps):
        settle(experts)
        experts.set_trace(1000)
        before = experts.stats()
        n_tokens_before = run.position
        run.step()
        settle(experts)
        after, records = experts.stats(), experts.take_trace(1000)
        loads = [now - then for now, then in zip(after.loads, before.loads, strict=True)]
        steps.append(StepReads(records, loads[Trigger.DEMAND], loads[Trigger.PREFETCH]))
        assert len(records) == len({record.layer for record in records}) == n_layers
        assert records[-1].n_tokens >= run.position - n_tokens_before
        assert last_positions(model)[0] == run.position - 1
    run.close()
    experts.set_trace(0)
    return steps


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", MODELS)
def test_drafts_wait_for_no_read(
    name: str, share: float, drafts: str, expert_model: Callable[[str], Path]
) -> None:
    """Reads on demand are those of the verification, and there are no others."""
    with SpeculationModel(expert_model(name), share=share) as model:
        for n_draft_experts in (0, variant_of(name).n_expert_used):
            options = DRAFTS[drafts] | {"prefetch": False, "draft_experts": n_draft_experts}
            model.make_drafts_pay(options)
            steps = trace_steps(model, options)
            for i, step in enumerate(steps):
                assert step.n_loads == step.n_missed, f"step {i}: somebody else read"
                assert step.n_prefetched == 0
            assert sum(step.n_loads for step in steps) > 0, "there was nothing to read"
            assert any(step.verified[0].n_tokens > 1 for step in steps), "nothing was drafted"


@pytest.mark.parametrize("name", MODELS)
def test_drafting_leaves_the_cache_as_it_is(name: str, expert_model: Callable[[str], Path]) -> None:
    """With every expert of the target's in memory nothing moves, however few the draft would like."""
    with SpeculationModel(expert_model(name), share=1) as model:
        model.answer(PROMPT, 24, EXACT)
        settle(model.experts)
        resident, stats = resident_set(model.experts), model.experts.stats()
        model.answer(PROMPT, 24, EXACT)
        assert resident_set(model.experts) == resident
        assert list(model.experts.stats().loads) == list(stats.loads)


@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-mxfp4"])
def test_an_empty_layer_drafts_without_experts(name: str, expert_model: Callable[[str], Path]) -> None:
    """A cache that was just emptied has no expert at all, and still nothing is read for drafts."""
    with SpeculationModel(expert_model(name), share=0) as model:
        run = Run(model, PROMPT, EXACT | {"prefetch": False})
        model.experts.allocate(model.experts.floor_bytes)
        assert not resident_set(model.experts)
        before = model.experts.stats()
        model.experts.set_trace(1000)
        run.step()
        settle(model.experts)
        records = model.experts.take_trace(1000)
        assert len(records) == len(model.experts.layers)
        n_loads = model.experts.stats().loads[Trigger.DEMAND] - before.loads[Trigger.DEMAND]
        assert n_loads == sum(record.n_misses for record in records) > 0
        assert run.close().report["n_admitted"] > 0


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-mxfp4"])
def test_admitted_drafts_are_prefetched(name: str, drafts: str, expert_model: Callable[[str], Path]) -> None:
    """And still nothing but the verification waits for a read."""
    with SpeculationModel(expert_model(name), share=0.3) as model:
        model.make_drafts_pay(DRAFTS[drafts])
        steps = trace_steps(model, DRAFTS[drafts])
        assert sum(step.n_prefetched for step in steps) > 0
        for i, step in enumerate(steps):
            assert step.n_loads == step.n_missed, f"step {i}: a draft read"
        stats = model.experts.stats()
        assert stats.prefetches_used + stats.prefetches_late > 0


@pytest.mark.parametrize("name", ["q4_k_m", "olmoe"])
def test_missing_experts_are_counted(name: str, expert_model: Callable[[str], Path]) -> None:
    """Of the report: experts that were not resident when the target asked for them."""
    with SpeculationModel(expert_model(name), share=0.6) as model:
        run = Run(model, PROMPT, EXACT | {"prefetch": False})
        before = model.experts.stats()
        for _ in range(N_STEPS):
            run.step()
        after, report = model.experts.stats(), run.close().report
    n_misses = after.misses[Phase.DECODE] - before.misses[Phase.DECODE]
    assert report["n_missing"] == report["n_missing_exact"] > 0
    assert report["n_experts_touched"] == report["n_experts_exact"] > report["n_missing"]
    assert report["n_touched_multi"] <= report["n_row_experts"]
    # one layer's reads may evict what another's snapshot of residency still had
    assert 0.5 * n_misses <= report["n_missing"] <= n_misses
