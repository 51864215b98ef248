"""Which options a request gets, what a server refuses, and what is made of a report."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from s2moe.engine import speculation
from s2moe.engine.errors import RequestError
from s2moe.engine.messages import CostFit, Speculation, SpeculationReport
from s2moe.engine.native_speculation import SpeculatorLimits
from s2moe.engine.speculation import SpeculationSupport, merge, refused, report_to_wire

NOTHING = Speculation()
ALL = SpeculatorLimits(method="s2moe", width=True, reason="")
NONE = SpeculatorLimits(method="off", width=False, reason="its state is recurrent")
REPORT: dict[str, Any] = {
    "method": "s2moe",
    "preset": "balanced",
    "disabled_reason": "",
    "disabled_detail": "",
    "n_steps": 20,
    "n_iterations": 12,
    "n_tokens": 40,
    "n_drafted": 60,
    "n_admitted": 30,
    "n_accepted": 20,
    "admitted_by_depth": [12, 10, 8, 0, 0, 0, 0],
    "accepted_by_depth": [10, 6, 4, 0, 0, 0, 0],
    "acceptance_lengths": [2, 4, 2, 4, 0, 0, 0, 0],
    "draft_seconds": 0.25,
    "verify_seconds": 0.5,
    "displaced_weight": 1.5,
    "n_token_layers": 1200,
    "judged_drafts": [[[0, 0, 0.0]] * 9 + [[12, 10, 11.25]]] * 7,
    "controller": {"is_paced": True, "state": "paused", "n_pauses": 2, "n_probes": 1, "draft_length": 2.5},
    "costs": {
        "verify": {"r2": 0.97, "mape": 0.03, "n": 12, "intercept_seconds": 0.01, "row_seconds": 0.002},
        "draft": {"r2": 0.9, "mape": 0.1, "n": 60},
        "single_seconds": 0.0125,
    },
}


def support(
    monkeypatch: pytest.MonkeyPatch,
    asked: Speculation = NOTHING,
    limits: SpeculatorLimits = ALL,
    n_batch: int = 512,
) -> SpeculationSupport:
    monkeypatch.setattr(speculation, "speculator_limits", lambda _library, _handle: limits)
    library: Any = None
    return SpeculationSupport.of_model(library, None, asked, n_batch)


# ── options ─────────────────────────────────────────────────────────────────────────────────────


def test_nothing_said_leaves_everything_but_the_method_to_the_preset() -> None:
    assert merge(NOTHING, NOTHING) == {"method": "s2moe"}


def test_request_wins_over_the_server_value_by_value() -> None:
    server = Speculation(method="cascade", max_nodes=4, draft_experts=2, adaptive=False)
    request = Speculation(max_nodes=1, adaptive=True, reuse_cap=0)
    assert merge(server, request) == {
        "method": "cascade",
        "max_nodes": 1,
        "draft_experts": 2,
        "adaptive": True,
        "reuse_cap": 0,
    }


def test_preset_of_a_request_is_not_mixed_with_the_servers_own_values() -> None:
    server = Speculation(
        preset="fast",
        exact=True,
        error_budget=0.2,
        reuse_strength=3.0,
        reuse_cap=20,
        single_token_bias=True,
        max_nodes=5,
        reuse_gating=False,
    )
    assert merge(server, Speculation(preset="balanced", reuse_cap=16)) == {
        "method": "s2moe",
        "preset": "balanced",
        "reuse_cap": 16,
        "max_nodes": 5,
        "reuse_gating": False,
    }


def test_exact_server_stays_exact_until_a_request_says_otherwise() -> None:
    server = Speculation(exact=True)
    assert merge(server, Speculation(error_budget=0.1))["exact"] is True
    assert merge(server, Speculation(exact=False))["exact"] is False


# ── what the server can do ──────────────────────────────────────────────────────────────────────


def test_default_server_drafts_on_the_shared_context(monkeypatch: pytest.MonkeyPatch) -> None:
    found = support(monkeypatch)
    assert (found.method, found.limit) == ("s2moe", "")
    assert not found.has_draft_context
    described = replace(found, preset="balanced").describe()
    assert described == "speculation is s2moe, preset balanced: drafts on the shared KV cache"


@pytest.mark.parametrize("asked", [Speculation(method="expert-skip"), Speculation(shared_context=False)])
def test_drafts_of_their_own_context_need_a_second_one(
    monkeypatch: pytest.MonkeyPatch, asked: Speculation
) -> None:
    assert support(monkeypatch, asked).has_draft_context
    assert not support(monkeypatch, asked, NONE).has_draft_context


def test_model_that_cannot_be_drafted_for_is_served_without_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = support(monkeypatch, limits=NONE)
    assert (found.method, found.preset, found.limit) == ("off", "", "its state is recurrent")
    assert found.describe() == "speculation is off: its state is recurrent"
    for method in ("s2moe", "expert-skip", "cascade", "off"):
        found.check(merge(found.asked, Speculation(method=method)))


def test_micro_batch_must_hold_a_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    assert support(monkeypatch, n_batch=8).is_possible
    found = support(monkeypatch, n_batch=7)
    assert (found.is_possible, found.method) == (False, "off")
    assert found.limit == "up to 8 tokens are verified at once, but --batch-size is 7"
    assert support(monkeypatch, limits=NONE, n_batch=7).limit == NONE.reason


def test_partial_limit_is_said_and_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    found = support(monkeypatch, limits=SpeculatorLimits("s2moe", False, "one draft after another only"))
    assert (found.method, found.limit) == ("s2moe", "one draft after another only")
    assert found.describe().endswith("; limited: one draft after another only")


def test_model_is_not_asked_when_the_server_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    found = support(monkeypatch, Speculation(method="off"), NONE)
    assert (found.is_possible, found.method, found.limit) == (False, "off", "")
    assert "--speculation" in found.describe()


def test_request_for_what_the_server_was_not_started_for_names_the_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [
        (
            Speculation(method="off"),
            Speculation(method="cascade"),
            "s2moe.speculation",
            "--speculation cascade",
        ),
        (NOTHING, Speculation(method="expert-skip"), "s2moe.speculation", "--speculation expert-skip"),
        (NOTHING, Speculation(shared_context=False), "s2moe.shared_context", "--no-shared-context"),
    ]
    for server, request, param, flag in cases:
        found = support(monkeypatch, server)
        with pytest.raises(RequestError) as caught:
            found.check(merge(server, request))
        assert (caught.value.code, caught.value.param) == ("invalid_value", param)
        assert flag in caught.value.message


def test_server_with_a_draft_context_takes_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    found = support(monkeypatch, Speculation(method="expert-skip"))
    for request in (
        Speculation(method="s2moe"),
        Speculation(shared_context=False),
        Speculation(method="off"),
    ):
        found.check(merge(found.asked, request))


def test_refused_option_is_named_as_the_request_names_it() -> None:
    assert refused("max_nodes must be between 1 and 7").param == "s2moe.max_nodes"
    assert refused('method must be "s2moe"').param == "s2moe.speculation"
    assert refused("residency_weight must be a number").param == "s2moe"
    assert refused("max_nodes must be between 1 and 7").message == "max_nodes must be between 1 and 7"


# ── the report ──────────────────────────────────────────────────────────────────────────────────


def test_report_reaches_the_wire_whole() -> None:
    report = report_to_wire(REPORT)
    assert report is not None
    for name, value in REPORT.items():
        if name not in ("disabled_detail", "judged_drafts", "controller", "costs"):
            assert getattr(report, name) == value, name
    assert report.judged_drafts == [[(0, 0, 0.0)] * 9 + [(12, 10, 11.25)]] * 7
    assert report.is_paced
    assert (report.controller_state, report.n_pauses, report.n_probes) == ("paused", 2, 1)
    assert report.draft_length == 2.5
    assert report.verify_fit == CostFit(r2=0.97, mape=0.03, n=12)
    assert report.draft_fit == CostFit(r2=0.9, mape=0.1, n=60)
    assert report.single_seconds == 0.0125


def test_pauses_and_probes_are_those_of_the_request() -> None:
    before = {**REPORT, "controller": {"n_pauses": 1, "n_probes": 1}}
    report = report_to_wire(REPORT, before)
    assert report is not None
    assert (report.n_pauses, report.n_probes) == (1, 0)


def test_report_may_say_more_or_less() -> None:
    report = report_to_wire(
        {"method": "cascade", "samples": [[1, 2]], "n_steps": None, "costs": {"verify": None}}
    )
    assert report == SpeculationReport(method="cascade")
    assert report_to_wire({}) == SpeculationReport()


@pytest.mark.parametrize("damage", [{"n_steps": "many"}, {"judged_drafts": [[[1, 2]]]}, {"n_accepted": [1]}])
def test_report_that_is_none_is_a_warning_and_no_failure(
    caplog: pytest.LogCaptureFixture, damage: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING):
        assert report_to_wire({**REPORT, **damage}) is None
    assert next(iter(damage)) in caplog.text
