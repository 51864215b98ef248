"""What a speculator refuses, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s2moe.engine.messages import STEP_DURATION_BOUNDS_SECONDS
from s2moe.engine.native import NativeError, Sampler, Status
from s2moe.engine.native_speculation import Speculator

from expert_models import variant_of
from speculation_model import (
    EXACT,
    N_VERIFY_ROWS,
    Run,
    SpeculationModel,
    assert_same,
    kv_bytes,
    last_positions,
    plain_answer,
    prefilled,
    row_of,
)
from stored_model import PROMPT

pytestmark = pytest.mark.usefixtures("batch_invariance")

NAME = "q4_0"
K = variant_of(NAME).n_expert_used
N_EXPERT = variant_of(NAME).n_expert
VALID: dict[str, list[Any]] = {
    "method": ["s2moe", "cascade", "off"],
    "preset": ["exact", "balanced", "fast"],
    "error_budget": [0, 0.05, 1],
    "reuse_strength": [0, 1.5, 10],
    "residency_weight": [0, 0.5, 10],
    "single_token_bias": [True, False],
    "reuse_cap": [0, K, N_EXPERT],
    "exact": [True, False],
    "draft_experts": [0, 1, K],
    "max_nodes": [1, N_VERIFY_ROWS - 1],
    "adaptive": [True, False],
    "reuse_gating": [True, False],
    "shared_context": [True],
    "prefetch": [True, False],
    "samples": [True, False],
}
INVALID: dict[str, list[Any]] = {
    "method": ["", "eagle", 1],
    "preset": ["", "slow", True],
    "error_budget": [-0.01, 1.01, "0.5", True],
    "reuse_strength": [-1, 10.5, "1"],
    "residency_weight": [-0.1, 11, [1]],
    "single_token_bias": [1, "true"],
    "reuse_cap": [-1, 1, K - 1, 2.5 * K + 0.25, "6"],
    "exact": [0, "false"],
    "draft_experts": [-1, K + 1, 1.5, "1"],
    "max_nodes": [0, N_VERIFY_ROWS, 2.5, "3"],
    "adaptive": [1, "no"],
    "reuse_gating": [0, "no"],
    "shared_context": [0, "no"],
    "prefetch": [1, "yes"],
}


@pytest.fixture(scope="module")
def model(expert_model: Callable[[str], Path], batch_invariance: None) -> Iterator[SpeculationModel]:
    with SpeculationModel(expert_model(NAME)) as opened:
        yield opened


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in VALID for value in VALID[key]], ids=str)
def test_values_within_their_domain(key: str, value: object, model: SpeculationModel) -> None:
    answer = model.answer(PROMPT, 4, {key: value})
    assert len(answer.tokens) == 4
    if key == "method":
        assert answer.report["method"] == value
    if key == "preset":
        assert answer.report["preset"] == value
    if key == "error_budget":
        assert answer.report["error_budget"] == pytest.approx(value)
        assert answer.report["preset"] == {0: "exact", 0.05: "balanced", 1: "custom"}[value]


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key in INVALID for value in INVALID[key]], ids=str
)
def test_values_outside_their_domain_are_named(key: str, value: object, model: SpeculationModel) -> None:
    with pytest.raises(NativeError) as error:
        model.speculator.begin({key: value})
    assert error.value.status == Status.INVALID
    assert error.value.message.startswith(key)


@pytest.mark.parametrize("value", [K + 1, N_EXPERT + 1])
def test_a_draft_has_at_most_the_experts_of_a_token(value: int, model: SpeculationModel) -> None:
    with pytest.raises(NativeError, match=f"^draft_experts must be between 0 and {K}$"):
        model.speculator.begin({"draft_experts": value})


@pytest.mark.parametrize("text", ["{", "[]", "null", '"s2moe"', '{"max_nodes": NaN}', '{"max_nodes": 1e400}'])
def test_options_that_are_no_object(text: str, model: SpeculationModel) -> None:
    library = model.library
    status = library._lib.s2moe_speculator_begin(model.speculator.handle, text.encode())
    assert status == Status.INVALID
    assert library.last_error()


@pytest.mark.parametrize("options", [{}, dict.fromkeys(VALID)], ids=["absent", "null"])
def test_absent_and_null_values_are_the_defaults(options: dict[str, None], model: SpeculationModel) -> None:
    model.speculator.begin(options)
    report = model.speculator.report()
    assert (report["method"], report["preset"]) == ("s2moe", "balanced")
    assert report["error_budget"] == pytest.approx(0.05)
    assert all(report[key] == 0 for key in report if key.startswith("n_") and key != "n_graph_builds")


def test_exact_wins(model: SpeculationModel) -> None:
    for options in ({"exact": True, "error_budget": 1}, {"exact": True, "preset": "fast"}):
        model.speculator.begin(options)
        assert model.speculator.report()["error_budget"] == 0


def test_refused_options_leave_the_answer_under_way(model: SpeculationModel) -> None:
    expected = plain_answer(model, PROMPT, 12)
    run = Run(model, PROMPT, EXACT)
    run.step(4)
    n_tokens = model.speculator.report()["n_tokens"]
    with pytest.raises(NativeError):
        model.speculator.begin({"max_nodes": 0})
    assert model.speculator.report()["n_tokens"] == n_tokens > 0
    while len(run.answer.tokens) < 12:
        run.step(12 - len(run.answer.tokens))
    assert_same(run.close(), expected)


def test_a_step_needs_a_beginning(model: SpeculationModel) -> None:
    sampler = prefilled(model, PROMPT, {"temperature": 0})
    speculator = Speculator(model.library, model.context)
    with pytest.raises(NativeError) as error:
        speculator.step(sampler, PROMPT[-1], len(PROMPT) - 1, 1)
    assert error.value.status == Status.INVALID
    assert model.n_kv == len(PROMPT) - 1
    speculator.close()
    sampler.close()


@pytest.mark.parametrize(
    ("root", "shift", "n_max"),
    [(-1, 0, 4), (10**6, 0, 4), (5, 1, 4), (5, -1, 4), (5, -1000, 4), (5, 0, 0), (5, 0, -3)],
)
def test_arguments_of_a_step(root: int, shift: int, n_max: int, model: SpeculationModel) -> None:
    run = Run(model, PROMPT, EXACT)
    before = kv_bytes(model)
    with pytest.raises(NativeError) as error:
        model.speculator.step(run.sampler, root, run.position + shift, n_max)
    assert error.value.status == Status.INVALID
    assert kv_bytes(model) == before
    assert last_positions(model) == [len(PROMPT) - 2] + [-1] * 7
    run.close()


@pytest.mark.parametrize("n_max", [1, 2, 3])
def test_no_more_tokens_than_wanted(n_max: int, model: SpeculationModel) -> None:
    expected = plain_answer(model, PROMPT, 12)
    run = Run(model, PROMPT, EXACT | {"draft_experts": K})
    while len(run.answer.tokens) < 12:
        run.step(n_max)
    answer = run.close()
    assert max(answer.steps) == n_max
    answer.tokens, answer.rows = answer.tokens[:12], answer.rows[:12]
    assert_same(answer, expected)
    if n_max == 1:
        assert answer.report["n_admitted"] == 0, "a draft that could never be used was verified"


def test_following_a_text(model: SpeculationModel) -> None:
    """The text is taken whatever the logits say, and each row is that of plain decoding along it."""
    text = [(90 + 11 * i) % 250 for i in range(24)]
    expected = forced_rows(model, text)
    prefilled(model, PROMPT, {}).close()
    speculator = model.speculator
    speculator.begin(EXACT)
    rows: list[bytes] = []
    root, done = PROMPT[-1], 0
    while done < len(text):
        n = speculator.follow(root, len(PROMPT) - 1 + done, text[done:])
        assert 1 <= n <= len(text) - done
        indices = [row.logits_index for row in speculator.rows()]
        assert len(indices) == n
        rows += [row_of(model, index).tobytes() for index in indices]
        done += n
        root = text[done - 1]
        assert model.n_kv == len(PROMPT) - 1 + done
    assert rows == expected
    assert speculator.report()["n_tokens"] == len(text)


def test_following_what_was_drafted_accepts_it(model: SpeculationModel) -> None:
    text = plain_answer(model, PROMPT, 16).tokens
    prefilled(model, PROMPT, {}).close()
    model.speculator.begin(EXACT | {"draft_experts": K})
    n_steps = done = 0
    while done < len(text):
        root = text[done - 1] if done else PROMPT[-1]
        done += model.speculator.follow(root, len(PROMPT) - 1 + done, text[done:])
        n_steps += 1
    assert n_steps < len(text) / 2


def forced_rows(model: SpeculationModel, text: list[int]) -> list[bytes]:
    prefilled(model, PROMPT, {}).close()
    rows = []
    for i, token in enumerate([PROMPT[-1], *text[:-1]]):
        model.library.decode(model.context, [token], len(PROMPT) - 1 + i)
        rows.append(row_of(model, -1).tobytes())
    return rows


def test_reports_are_json_of_whole_numbers_and_lists(model: SpeculationModel) -> None:
    report = model.answer(PROMPT, 16, EXACT | {"samples": True}).report
    json.dumps(report, allow_nan=False)
    assert len(report["admitted_by_depth"]) == len(report["accepted_by_depth"]) == N_VERIFY_ROWS - 1
    assert len(report["acceptance_lengths"]) == N_VERIFY_ROWS
    assert sum(report["admitted_by_depth"]) == report["n_admitted"] <= report["n_drafted"]
    assert sum(report["accepted_by_depth"]) == report["n_accepted"]
    assert sum(report["acceptance_lengths"]) == report["n_iterations"]
    lengths = enumerate(report["acceptance_lengths"])
    assert sum(length * count for length, count in lengths) == report["n_accepted"]
    assert report["n_tokens"] == report["n_steps"] + report["n_accepted"] == 16
    assert report["n_committed_rows"] == 16
    assert report["n_token_layers"] == 16 * len(variant_of(NAME).moe_layers)
    judged = [each for tenths in report["judged_drafts"] for each in tenths]
    # of siblings behind a rejected draft nothing is known
    assert report["n_accepted"] == sum(n for _, n, _ in judged) <= sum(n for n, _, _ in judged)
    assert sum(n for n, _, _ in judged) <= report["n_admitted"]
    assert report["verify_seconds"] > 0
    assert report["draft_seconds"] > 0


def test_confidences_are_counted_by_depth_and_tenth(model: SpeculationModel) -> None:
    report = model.answer(PROMPT, 32, EXACT).report
    judged = report["judged_drafts"]
    assert [len(tenths) for tenths in judged] == [10] * (N_VERIFY_ROWS - 1)
    assert [sum(n for _, n, _ in tenths) for tenths in judged] == report["accepted_by_depth"]
    assert report["n_iterations"] < sum(n for tenths in judged for n, _, _ in tenths)
    for tenths in judged:
        for tenth, (n, n_accepted, expected) in enumerate(tenths):
            assert n_accepted <= n
            assert n * tenth / 10 <= expected <= n * (tenth + 1) / 10
    # what one answer counted is not the next one's
    again = model.answer(PROMPT, 1, {"method": "off"}).report
    assert sum(n for tenths in again["judged_drafts"] for n, _, _ in tenths) == 0


def test_durations_have_the_bounds_that_metrics_show(model: SpeculationModel) -> None:
    report = model.answer(PROMPT, 8, EXACT).report
    assert tuple(report["step_duration_bounds"]) == STEP_DURATION_BOUNDS_SECONDS
    durations = report["step_durations"]
    for each in durations.values():
        assert len(each["counts"]) == len(STEP_DURATION_BOUNDS_SECONDS) + 1
    assert sum(durations["verify"]["counts"]) == report["n_iterations"]
    assert sum(durations["plain"]["counts"]) == report["n_steps"] - report["n_iterations"]


def test_a_sampler_of_a_grammar_that_is_done(model: SpeculationModel) -> None:
    """The answer ends inside a step where the grammar allows nothing but its end."""
    sampling = {"temperature": 0, "grammar": 'root ::= "ab" "c"'}
    sampler: Sampler = prefilled(model, PROMPT, sampling)
    model.speculator.begin(EXACT)
    tokens = [PROMPT[-1]]
    while tokens[-1] != 2:  # the end of generation of these models
        tokens += model.speculator.step(sampler, tokens[-1], len(PROMPT) - 2 + len(tokens), 8)
    assert model.detokenize(tokens[1:-1]) == "abc"
    sampler.close()
