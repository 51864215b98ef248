"""What a speculator learns, of whom, and what it makes of costs that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s2moe.engine.native_experts import Experts

from expert_models import variant_of
from speculation_model import EXACT, N_VERIFY_ROWS, Run, SpeculationModel, write_small_model
from stored_model import PROMPT, settle

pytestmark = pytest.mark.usefixtures("batch_invariance")

NAME = "q4_0"
MEANS = ("draft_seconds", "single_seconds", "typical_hits", "typical_misses")
MAX_REGIMES = 16
IDLE_TOKENS = 4
"""Index among the controller's numbers: tokens since the last probe while drafting was ruled out."""
PAUSE_TOKENS = 1024
"""Between two probes while drafting is ruled out."""
N_DRAFTING_STEPS = 7
DRAFTING_SECONDS = 9
"""Indices among the controller's numbers."""
GATED: dict[str, Any] = {"preset": "fast", "adaptive": False}
LONG_PROMPT = [40 + (7 * i) % 200 for i in range(230)]


def regimes_of(model: SpeculationModel) -> dict[str, Any]:
    learnt: dict[str, Any] = json.loads(model.speculator.state())["regimes"]
    return learnt


def regime_of(model: SpeculationModel, options: dict[str, Any]) -> str:
    """The key of the regime that answers with these options share: the one used last."""
    model.speculator.begin(options)
    return list(regimes_of(model))[-1]


# ── who shares what was learnt ──────────────────────────────────────────────────────────────────


def test_settings_that_change_times_are_learnt_apart(expert_model: Callable[[str], Path]) -> None:
    k = variant_of(NAME).n_expert_used
    distinct: list[dict[str, Any]] = [
        {},
        {"preset": "exact"},
        {"preset": "fast"},
        {"error_budget": 0.07},
        {"error_budget": 0.3},
        {"reuse_strength": 2},
        {"residency_weight": 3},
        {"reuse_cap": k},
        {"single_token_bias": False},
        {"draft_experts": k},
        {"max_nodes": 3},
        {"adaptive": False},
        {"prefetch": False},
        {"preset": "exact", "prefetch": False},
        {"method": "cascade"},
    ]
    with SpeculationModel(expert_model(NAME)) as model:
        keys = [regime_of(model, options) for options in distinct]
        assert len(set(keys)) == len(distinct), keys
        same: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"error_budget": 0.05, "reuse_strength": 1, "max_nodes": 7}, {}),
            ({"reuse_gating": False, "reuse_strength": 2}, {"preset": "exact"}),
            ({"preset": "fast", "error_budget": 0.07}, {"error_budget": 0.07}),
        ]
        for options, others in same:
            assert regime_of(model, options) == regime_of(model, others), options


def test_experiments_of_one_client_do_not_erase_what_was_learnt(expert_model: Callable[[str], Path]) -> None:
    path = expert_model(NAME)
    with SpeculationModel(path) as model:
        model.answer(PROMPT, 16, {"preset": "exact"})
        learnt = model.speculator.report()["costs"]["single_seconds"]
        assert learnt > 0
        for i in range(2 * MAX_REGIMES):
            model.speculator.begin({"error_budget": (i + 1) / 100})
            model.speculator.begin({"preset": "exact"})
            assert model.speculator.report()["costs"]["single_seconds"] == learnt
        assert len(regimes_of(model)) == MAX_REGIMES
        state = model.speculator.state()
    with SpeculationModel(path, state=state) as model:  # also after a restart
        assert json.loads(model.speculator.state()) == json.loads(state)
        for i in range(MAX_REGIMES - 1):
            model.speculator.begin({"error_budget": (50 + i) / 100})
        model.speculator.begin({"preset": "exact"})
        assert model.speculator.report()["costs"]["single_seconds"] == pytest.approx(learnt)


def test_states_of_earlier_versions_are_learnt_again(expert_model: Callable[[str], Path]) -> None:
    """A controller of another version, and settings that were kept together."""
    path = expert_model(NAME)
    with SpeculationModel(path) as model:
        model.answer(PROMPT, 16, {"preset": "exact"})
        state = json.loads(model.speculator.state())
    (regime,) = state["regimes"].values()
    regime["controller"] = [1.0, *[0.0] * 17]
    state["regimes"]["custom/1/shared"] = regime
    with SpeculationModel(path, state=json.dumps(state).encode()) as model:
        answer = model.answer(PROMPT, 16, {"preset": "exact"})
        assert answer.report["costs"]["single_seconds"] > 0
        model.speculator.begin({"error_budget": 0.3})
        assert model.speculator.report()["costs"]["single_seconds"] == 0


# ── costs that rule drafting out ────────────────────────────────────────────────────────────────


def read_everything(experts: Experts) -> None:
    experts.prefetch([(layer, e) for layer in experts.layers for e in range(len(experts.residency(layer)))])
    settle(experts)


def run_on(model: SpeculationModel, n_tokens: int) -> list[dict[str, Any]]:
    """Reports after each step of an answer, the KV cache being cut back to the prompt where it is full."""
    run = Run(model, PROMPT, {"preset": "exact"})
    reports: list[dict[str, Any]] = []
    while not reports or reports[-1]["n_tokens"] < n_tokens:
        run.step()
        reports.append(model.speculator.report())
        if run.position > 200:
            run.cut_back()
    run.close()
    return reports


def test_costs_that_rule_drafting_out_are_measured_again(tmp_path: Path) -> None:
    """Learnt while something else kept the machine busy, and kept over a restart: with every expert in memory
    drafting would stay off for ever."""
    path = write_small_model(tmp_path)
    with SpeculationModel(path) as model:
        read_everything(model.experts)
        run_on(model, 200)
        state = json.loads(model.speculator.state())
    ((key, regime),) = state["regimes"].items()
    means = dict(zip(MEANS, regime["means"], strict=True))
    assert means["typical_hits"] > 0
    dear = 1e6 * means["single_seconds"]  # whatever else the machine does meanwhile
    regime["means"][MEANS.index("draft_seconds")] = dear
    regime["controller"][IDLE_TOKENS] = 0
    with SpeculationModel(path, state=json.dumps(state).encode()) as model:
        read_everything(model.experts)
        n_done = 0
        for n_tokens in (PAUSE_TOKENS // 2, PAUSE_TOKENS // 4):  # over several answers
            n_done += n_tokens
            for report in run_on(model, n_tokens):
                assert report["controller"]["state"] == "paused"
                assert report["n_drafted"] == report["draft_seconds"] == 0
        first, *_ = (report for report in run_on(model, PAUSE_TOKENS) if report["n_drafted"] > 0)
        assert n_done + first["n_tokens"] - first["n_accepted"] == PAUSE_TOKENS + 1
        assert first["controller"]["n_probes"] == 1
        depth = 1 + (first["n_steps"] - 1) % 4  # as in the first steps of all, whatever that costs
        assert first["admitted_by_depth"] == [1] * depth + [0] * (N_VERIFY_ROWS - 1 - depth)
        assert model.speculator.report()["controller"]["state"] == "paused"
        assert model.speculator.report()["n_drafted"] <= 3 * 4
        learnt = dict(zip(MEANS, regimes_of(model)[key]["means"], strict=True))
        assert 0 < learnt["draft_seconds"] < 0.95 * dear


# ── drafts that fail, and trees that shrink ─────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [EXACT, GATED], ids=["exact", "gated"])
def test_a_step_whose_draft_failed_is_no_plain_step(
    options: dict[str, Any], expert_model: Callable[[str], Path]
) -> None:
    """The draft's context fills up: experts are on their way, and time was spent on it."""
    with SpeculationModel(expert_model(NAME), share=0.5, n_ctx=512, draft_n_ctx=256) as model:
        run = Run(model, LONG_PROMPT, options | {"shared_context": False})
        before = model.speculator.report()
        while not (report := model.speculator.report())["disabled_reason"]:
            before = report
            run.step()
        assert before["n_iterations"] == before["n_steps"] > 0
        assert report["n_steps"] == before["n_steps"] + 1
        assert report["costs"]["single_seconds"] == before["costs"]["single_seconds"] == 0
        assert report["costs"]["verify"]["n"] == before["costs"]["verify"]["n"]
        assert report["draft_seconds"] > before["draft_seconds"]
        position = len(LONG_PROMPT) - 1 + before["n_tokens"]
        n_evaluated = report["n_drafted"] - before["n_drafted"]
        assert n_evaluated == 256 - position - 1, "what filled the context, but for the root"
        run.step()
        assert model.speculator.report()["costs"]["single_seconds"] > 0, "the steps behind it are plain"
        run.close()


def test_a_prompt_that_the_draft_evaluates_is_not_held_against_drafting(
    expert_model: Callable[[str], Path],
) -> None:
    """With a context of its own, the first draft of an answer evaluates the prompt, and the first after a
    pause what was decoded meanwhile."""
    with SpeculationModel(expert_model(NAME), n_ctx=512, draft_n_ctx=512) as model:
        run = Run(model, LONG_PROMPT, {"preset": "exact", "shared_context": False})
        while model.speculator.report()["n_drafted"] == 0:
            run.step()
        draft_seconds = model.speculator.report()["draft_seconds"]
        (regime,) = regimes_of(model).values()
        assert regime["controller"][N_DRAFTING_STEPS] == 1
        assert 0 < regime["controller"][DRAFTING_SECONDS] < draft_seconds
        run.close()


def admitted(model: SpeculationModel, options: dict[str, Any], n_max: int) -> list[int]:
    """Drafts that the first step of an answer verifies, by depth."""
    run = Run(model, PROMPT, {"method": "expert-skip"} | options)
    run.step(n_max)
    by_depth: list[int] = run.close().report["admitted_by_depth"]
    return by_depth


def test_the_tree_of_expert_skip_follows_its_limits(expert_model: Callable[[str], Path]) -> None:
    with SpeculationModel(expert_model(NAME), draft_n_ctx=256) as model:
        assert admitted(model, {}, 20) == [2] * 7
        assert admitted(model, {"max_nodes": 7}, 20) == [2, 2, 2, 1, 0, 0, 0]
        assert admitted(model, {"max_nodes": 2}, 20) == [2, 0, 0, 0, 0, 0, 0]
        assert admitted(model, {"max_nodes": 1}, 20) == [1, 0, 0, 0, 0, 0, 0]
        # near the end of the answer no draft is deeper than what is left behind the root's own token
        assert admitted(model, {}, 4) == [2, 2, 2, 0, 0, 0, 0]
        assert admitted(model, {}, 2) == [2, 0, 0, 0, 0, 0, 0]
        assert admitted(model, {}, 1) == [0] * 7


def test_a_cascade_tests_no_length_twice(expert_model: Callable[[str], Path]) -> None:
    with SpeculationModel(expert_model(NAME)) as model:
        run = Run(model, PROMPT, {"method": "cascade", "max_nodes": 1})
        drafted = []
        for _ in range(28):
            before = model.speculator.report()["n_iterations"]
            run.step()
            drafted.append(model.speculator.report()["n_iterations"] > before)
        run.close()
    assert drafted[:8] == [False] * 4 + [True] * 4
    # then the better one for 16 steps or more, and without drafts again
    assert drafted[8:24] in ([False] * 16, [True] * 16)
    assert not any(drafted[24:])


def test_a_cascade_tests_all_lengths_in_short_answers(expert_model: Callable[[str], Path]) -> None:
    """There is never room for 4 drafts, so the longest chain that there is room for stands for them."""
    drafted = []
    with SpeculationModel(expert_model(NAME)) as model:
        run = Run(model, PROMPT, {"method": "cascade"})
        for _ in range(5 * 4 + 2 * 16 + 4):
            before = model.speculator.report()["n_admitted"]
            run.step(3)
            drafted.append(model.speculator.report()["n_admitted"] - before)
        run.close()
    assert drafted[:20] == [0] * 4 + [1] * 4 + [2] * 12
    # then the best one, for 16 steps, or 32 if that is none, and without drafts again
    n_kept = 32 if drafted[20] == 0 else 16
    assert set(drafted[20 : 20 + n_kept]) == {drafted[20]}
    assert drafted[20 + n_kept :][:4] == [0] * 4
