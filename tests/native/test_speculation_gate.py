"""The gate bends the choice of experts as its rule says, never further than the error budget allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from s2moe.engine.native import Library

from gate_reference import Choice, GateSettings, Router, Scores, choose_experts, displaced_share
from native_gate import select_experts
from speculation_model import EXACT, Run, SpeculationModel
from stored_model import PROMPT

N_CASES = 400
KINDS = ("softmax", "flat", "sigmoid", "groups", "logits", "ties", "infinite logits", "no numbers")


@dataclass(frozen=True)
class Case:
    """One layer of one verification."""

    settings: GateSettings
    router: Router
    residency: npt.NDArray[np.uint8]
    prefixes: Scores
    allowances: Scores

    def reference(self) -> list[Choice]:
        return choose_experts(self.settings, self.router, self.residency, self.prefixes, self.allowances)

    def native(self, library: Library) -> list[Choice]:
        return select_experts(
            library, self.settings, self.router, self.residency, self.prefixes, self.allowances
        )


def random_router(kind: str, order: np.random.Generator) -> Router:
    n_rows, n_expert = int(order.integers(1, 9)), int(order.choice([4, 8, 12, 32, 64, 160, 512]))
    k = int(order.integers(1, min(9, n_expert)))
    # rows resemble each other, as neighbouring tokens do
    logits = 1.5 * order.standard_normal((1, n_expert)) + order.standard_normal((n_rows, n_expert))
    if kind == "flat":
        logits *= 0.02
    if kind == "ties":
        logits = np.round(logits)
    logits = logits.astype(np.float32)
    if kind == "infinite logits":  # of a damaged row, beside sound ones
        for row in np.flatnonzero(order.random(n_rows) < 0.3):
            logits[row, order.integers(0, n_expert, int(order.integers(1, 4)))] = np.inf
    if kind in ("logits", "infinite logits"):
        return Router(k, logits, logits, scores_are_probabilities=False, weights_are_logits=True)
    if kind in ("sigmoid", "groups", "no numbers"):
        probabilities = 1 / (1 + np.exp(-logits))
        scores = probabilities + 0.05 * order.standard_normal(n_expert).astype(np.float32)
        if kind == "groups":
            k = min(k, n_expert // 4)
            for row in scores:
                row.reshape(4, -1)[order.integers(4)] = -np.inf
        if kind == "no numbers":  # in the scores, which may have a bias, and seldom in the weights, too
            for row in range(n_rows):
                damaged = order.integers(0, n_expert, int(order.integers(0, 4)))
                scores[row, damaged] = order.choice([np.nan, np.inf], len(damaged), p=[0.7, 0.3])
                if order.random() < 0.1:
                    probabilities[row, damaged] = order.choice([np.nan, np.inf])
        return Router(k, scores, probabilities, scores_are_probabilities=False)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return Router(k, probabilities, probabilities)


def random_case(kind: str, seed: int) -> Case:
    order = np.random.default_rng([seed, KINDS.index(kind)])
    router = random_router(kind, order)
    n_rows, n_expert = router.scores.shape
    prefixes = np.minimum.accumulate(order.random(n_rows))
    prefixes[0] = 1
    settings = GateSettings(
        budget=float(order.choice([0.02, 0.05, 0.5, 1])),
        strength=float(order.choice([0.5, 1, 3, 10])),
        residency_weight=float(order.choice([0, 0.5, 2, 10])),
        cap=int(order.choice([0, router.k, min(n_expert, 3 * router.k)])),
        single_token_bias=bool(order.integers(2)),
    )
    return Case(
        settings,
        router,
        order.choice(np.array([0, 1, 2], np.uint8), n_expert, p=[0.6, 0.1, 0.3]),
        prefixes,
        order.choice([-0.1, 0, 0.02, 0.1, 0.3, 1], n_rows).astype(np.float64),
    )


def changed(choices: list[Choice]) -> int:
    """Rows with another choice than the router's."""
    return sum(choice.chosen != set(choice.exact) for choice in choices)


@pytest.mark.parametrize("kind", KINDS)
def test_the_operation_equals_the_reference(kind: str, library: Library) -> None:
    n_changed = 0
    for seed in range(N_CASES):
        case = random_case(kind, seed)
        expected, choices = case.reference(), case.native(library)
        n_changed += changed(expected)
        for b, (choice, reference) in enumerate(zip(choices, expected, strict=True)):
            assert choice.exact == reference.exact, f"seed {seed}, row {b}"
            assert choice.chosen == reference.chosen, f"seed {seed}, row {b}"
            assert choice.displaced == pytest.approx(reference.displaced, abs=1e-6), f"seed {seed}, row {b}"
    assert n_changed > N_CASES / 4, f"only {n_changed} rows were bent"


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_exceeds_its_allowance(kind: str, library: Library) -> None:
    n_spent = 0
    for seed in range(N_CASES):
        case = random_case(kind, seed)
        mixing = case.router.mixing
        for b, choice in enumerate(case.native(library)):
            share = displaced_share(mixing[b], choice.chosen, choice.exact)
            assert share <= max(case.allowances[b], 0) + 1e-6  # weights are floats
            assert share == pytest.approx(choice.displaced, abs=1e-6)
            n_spent += share > 0
            n_allowed = int((case.router.scores[b] > -np.inf).sum())
            assert len(choice.chosen) == len(choice.exact) == min(case.router.k, n_allowed)
            assert all(case.router.scores[b][e] > -np.inf for e in choice.chosen)
    assert n_spent > 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_new_is_missing(kind: str, library: Library) -> None:
    """Rows are bent to what is in memory, on its way or read for another row anyway, never to new reads."""
    n_fewer = 0
    for seed in range(N_CASES):
        case = random_case(kind, seed)
        choices = case.native(library)
        absent = set(np.flatnonzero(case.residency == 0).tolist())
        exactly = set().union(*(choice.exact for choice in choices)) & absent
        gated = set().union(*(choice.chosen for choice in choices)) & absent
        assert gated <= exactly
        n_fewer += len(gated) < len(exactly)
    assert n_fewer > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "switched_off",
    [{"budget": 0.0}, {"strength": 0.0}, {"allowances": 0.0}],
    ids=["budget", "strength", "allowance"],
)
def test_without_a_budget_the_choice_is_the_routers(
    switched_off: dict[str, float], kind: str, library: Library
) -> None:
    for seed in range(N_CASES // 4):
        case = random_case(kind, seed)
        if "allowances" in switched_off:
            case = replace(case, allowances=np.zeros_like(case.allowances))
        else:
            case = replace(case, settings=replace(case.settings, **switched_off))
        choices = case.native(library)
        assert changed(choices) == 0
        assert [choice.displaced for choice in choices] == [0] * len(choices)
        logits = case.router.logits
        for row, choice in zip(np.where(np.isnan(logits), -np.inf, logits), choices, strict=True):
            assert sorted(row[choice.exact]) == sorted(np.sort(row)[::-1][: len(choice.exact)])


@pytest.mark.parametrize("kind", KINDS)
def test_certain_rows_keep_their_experts(kind: str, library: Library) -> None:
    """The root, whose prefix confidence is 1, unless single tokens are bent, too."""
    n_bent = 0
    for seed in range(N_CASES):
        case = random_case(kind, seed)
        lax = np.ones_like(case.allowances)
        strict = replace(case, settings=replace(case.settings, single_token_bias=False), allowances=lax)
        for choice, prefix in zip(strict.native(library), strict.prefixes, strict=True):
            assert prefix < 1 or choice.chosen == set(choice.exact)
        bent = replace(strict, settings=replace(strict.settings, single_token_bias=True))
        n_bent += changed(bent.native(library)[:1])
    assert n_bent > 0


def test_a_single_row_is_bent_to_what_is_resident(library: Library) -> None:
    """By hand: four experts, the best two chosen, the second of them absent."""
    scores = np.array([[0.40, 0.30, 0.25, 0.05]], np.float32)
    case = Case(
        GateSettings(budget=1, strength=1, single_token_bias=True),
        Router(2, scores, scores),
        np.array([0, 0, 2, 2], np.uint8),
        np.ones(1),
        np.ones(1),
    )
    (choice,) = case.native(library)
    # the margin, log(.40 / .25), lifts expert 2 to log(.40): above expert 1, not above expert 0
    assert choice.exact == [0, 1]
    assert choice.chosen == {0, 2}
    assert choice.displaced == pytest.approx(0.25 / 0.65, rel=1e-6)
    (strict,) = replace(case, allowances=np.array([0.38])).native(library)
    assert strict.chosen == {0, 1}


@pytest.mark.parametrize("n_rows", [1, 2])
def test_infinite_scores_have_no_margin(n_rows: int, library: Library) -> None:
    """By hand: inf − inf is no number, and bends nobody; the sound row is bent as ever."""
    infinite, sound = [0, 0, 0, np.inf, np.inf, np.inf], [3, 2, 1.9, -1, -2, -2]
    scores = np.array([infinite, sound][2 - n_rows :], np.float32)
    case = Case(
        GateSettings(budget=1, strength=1, single_token_bias=True),
        Router(2, scores, scores, scores_are_probabilities=False, weights_are_logits=True),
        np.array([0, 0, 2, 2, 0, 0], np.uint8),
        np.ones(n_rows),
        np.ones(n_rows),
    )
    *damaged, last = case.native(library)
    assert last.chosen == {0, 2}
    assert 0 < last.displaced < 1
    for choice in damaged:
        assert choice.chosen == set(choice.exact) == {3, 4}
        assert choice.displaced == 0


# ── in a running model ──────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("batch_invariance")
@pytest.mark.parametrize("budget", [0.0, 0.01, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-mxfp4", "deepseek2-v3-q4_k", "olmoe"])
@pytest.mark.parametrize("adaptive", [False, True], ids=["forced", "adaptive"])
def test_the_budget_holds_at_every_commit(
    adaptive: bool, name: str, budget: float, expert_model: Callable[[str], Path]
) -> None:
    options = {"adaptive": adaptive, "error_budget": budget, "reuse_strength": 3, "single_token_bias": True}
    n_layers = 0
    with SpeculationModel(expert_model(name), share=0.2) as model:
        if adaptive:
            model.make_drafts_pay(options)
        n_moe_layers = len(model.experts.layers)
        run = Run(model, PROMPT, options)
        n_biased = 0
        for _ in range(30):
            run.step()
            report = model.speculator.report()
            n_layers = n_moe_layers * len(run.answer.tokens)
            n_biased += sum(row.n_biased > 0 for row in model.speculator.rows())
            assert report["n_token_layers"] == n_layers
            assert report["n_committed_rows"] == len(run.answer.tokens)
            assert report["n_biased_rows"] == n_biased
            assert report["displaced_weight"] <= budget * n_layers * (1 + 1e-9)
            assert report["error_budget"] == pytest.approx(budget)
            assert (report["displaced_weight"] > 0) == (n_biased > 0)
        assert report["n_admitted"] > 2 * report["n_steps"]
        run.close()
    if budget == 0:
        assert n_biased == 0
    elif budget >= 0.2:
        assert n_biased > 0
        assert report["n_missing"] < report["n_missing_exact"]
        assert report["n_experts_touched"] <= report["n_experts_exact"]


@pytest.mark.usefixtures("batch_invariance")
@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-mxfp4"])
def test_the_root_is_bent_only_on_demand(name: str, expert_model: Callable[[str], Path]) -> None:
    lax = {"adaptive": False, "error_budget": 1, "reuse_strength": 10, "residency_weight": 10}
    n_biased = {}
    with SpeculationModel(expert_model(name), share=0) as model:
        for single in (False, True):
            run = Run(model, PROMPT, lax | {"single_token_bias": single})
            n_biased[single] = 0
            for _ in range(20):
                run.step()
                n_biased[single] += model.speculator.rows()[0].n_biased
            run.close()
    assert n_biased[False] == 0
    assert n_biased[True] > 0


@pytest.mark.usefixtures("batch_invariance")
@pytest.mark.parametrize("name", ["q4_k_m", "olmoe"])
def test_gating_touches_fewer_experts(name: str, expert_model: Callable[[str], Path]) -> None:
    with SpeculationModel(expert_model(name), share=0.2) as model:
        exact = model.answer(PROMPT, 32, EXACT).report
        gated = model.answer(PROMPT, 32, {"adaptive": False, "error_budget": 0.3, "reuse_strength": 3}).report
    assert exact["n_touched_multi"] == exact["n_exact_multi"]
    assert gated["n_touched_multi"] < gated["n_exact_multi"]
