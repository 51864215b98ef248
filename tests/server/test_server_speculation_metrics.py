"""/metrics of speculative decoding."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_engine import MODEL, FakeEngine, endless, finished, started, step
from prometheus_client.parser import text_string_to_metric_families
from server_rig import ServerRig, StartServer, chat
from speculation_reports import NOTHING_DRAFTED, REPORT

from s2moe.engine.messages import Failed, Finished, Generate, SpeculationReport, Step, Timings
from s2moe.server import speculation_metrics as names
from s2moe.server.engine_client import EngineState

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
METHODS = ("s2moe", "expert-skip", "cascade", "off")


async def samples(rig: ServerRig) -> Samples:
    text = (await rig.http.get("/metrics")).text
    return {
        (sample.name.removeprefix("s2moe_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def end(report: SpeculationReport | None, reason: str = "stop") -> Finished:
    return Finished(request_id="r", reason=reason, timings=Timings(speculation=report))


async def test_every_label_value_exists_at_zero(rig: ServerRig) -> None:
    found = await samples(rig)
    expected: list[tuple[str, dict[str, str]]] = [
        *(
            (f"{name}_total", {"model": "demo", "method": m})
            for m in METHODS
            for name in (
                "spec_decode_drafts",
                "spec_decode_draft_tokens",
                "spec_decode_accepted_tokens",
            )
        ),
        *(
            (f"{name}_count", {"method": m})
            for m in METHODS
            for name in (
                "spec_decode_acceptance_length",
                "spec_decode_request_acceptance_ratio",
                "spec_decode_request_acceptance_length",
            )
        ),
        *(
            ("spec_decode_phase_seconds_total", {"phase": p, "method": m})
            for p in names.PHASES
            for m in METHODS
        ),
        *(
            (f"spec_decode_{kind}_tokens_per_position_total", {"position": str(p)})
            for p in range(7)
            for kind in (
                "accepted",
                "draft",
            )
        ),
        *(("spec_decode_nodes_total", {"outcome": o}) for o in ("drafted", "admitted", "accepted")),
        *(("spec_decode_reuse_ratio_count", {"gating": g}) for g in ("on", "off")),
        *(
            ("spec_decode_displaced_weight_ratio_count", {"preset": p})
            for p in ("exact", "balanced", "fast", "custom")
        ),
        *(("spec_decode_routing_prediction_total", {"result": r}) for r in ("hit", "miss", "extra")),
        *(
            ("spec_decode_confidence_observed_total", {"depth": str(d), "bin": f"0.{b}", "accepted": a})
            for d in range(1, 8)
            for b in range(10)
            for a in ("true", "false")
        ),
        *(
            ("spec_decode_confidence_expected_total", {"depth": str(d), "bin": f"0.{b}"})
            for d in range(1, 8)
            for b in range(10)
        ),
        ("spec_decode_pauses_total", {}),
        ("spec_decode_probes_total", {}),
        *(("spec_decode_controller_state", {"state": s}) for s in ("drafting", "paused", "probing")),
        *(("spec_decode_disabled_total", {"reason": r}) for r in names.DISABLED_REASONS),
        ("spec_decode_enabled", {}),
        ("spec_decode_draft_length", {}),
        ("spec_decode_graph_builds_total", {}),
        *(
            (f"cost_model_{name}", {"target": t})
            for t in ("verify", "draft")
            for name in ("r2", "mape_ratio", "samples")
        ),
    ]
    for name, labels in expected:
        assert found[(name, tuple(sorted(labels.items())))] == 0, (name, labels)
    assert found[("spec_decode_controller_state", (("state", "off"),))] == 1


async def test_each_number_of_a_report_reaches_its_series(rig: ServerRig) -> None:
    rig.metrics.on_finished(end(REPORT))
    rig.metrics.on_finished(end(REPORT, "length"))
    of_method = {"method": "s2moe"}
    of_model = {"model": "demo", **of_method}
    expected: list[tuple[str, dict[str, str], float]] = [
        ("spec_decode_drafts_total", of_model, 16),
        ("spec_decode_draft_tokens_total", of_model, 48),
        ("spec_decode_accepted_tokens_total", of_model, 24),
        ("spec_decode_draft_tokens_per_position_total", {"position": "0"}, 24),
        ("spec_decode_draft_tokens_per_position_total", {"position": "2"}, 8),
        ("spec_decode_accepted_tokens_per_position_total", {"position": "0"}, 12),
        ("spec_decode_accepted_tokens_per_position_total", {"position": "1"}, 10),
        ("spec_decode_accepted_tokens_per_position_total", {"position": "3"}, 0),
        # per iteration, the target's own token included: 2 of one, 1 of two, 4 of three, 1 of four tokens
        ("spec_decode_acceptance_length_count", of_method, 16),
        ("spec_decode_acceptance_length_sum", of_method, 2 * (2 + 2 + 12 + 4)),
        ("spec_decode_acceptance_length_bucket", {**of_method, "le": "1.0"}, 4),
        ("spec_decode_acceptance_length_bucket", {**of_method, "le": "2.0"}, 6),
        ("spec_decode_acceptance_length_bucket", {**of_method, "le": "8.0"}, 16),
        ("spec_decode_request_acceptance_ratio_count", of_method, 2),
        ("spec_decode_request_acceptance_ratio_sum", of_method, 1.0),
        ("spec_decode_request_acceptance_length_count", of_method, 2),
        ("spec_decode_request_acceptance_length_sum", of_method, 5.0),
        ("spec_decode_phase_seconds_total", {**of_method, "phase": "draft"}, 1.0),
        ("spec_decode_phase_seconds_total", {**of_method, "phase": "verify"}, 4.0),
        ("spec_decode_phase_seconds_total", {**of_method, "phase": "sample"}, 0.5),
        ("spec_decode_phase_seconds_total", {**of_method, "phase": "stall"}, 2.0),
        ("spec_decode_nodes_total", {"outcome": "drafted"}, 80),
        ("spec_decode_nodes_total", {"outcome": "admitted"}, 48),
        ("spec_decode_nodes_total", {"outcome": "accepted"}, 24),
        ("spec_decode_reuse_ratio_sum", {"gating": "on"}, 1.1),
        ("spec_decode_reuse_ratio_sum", {"gating": "off"}, 1.5),
        ("spec_decode_reuse_ratio_count", {"gating": "off"}, 2),
        ("spec_decode_displaced_weight_ratio_count", {"preset": "balanced"}, 2),
        ("spec_decode_displaced_weight_ratio_sum", {"preset": "balanced"}, 0.03),
        ("spec_decode_displaced_weight_ratio_bucket", {"preset": "balanced", "le": "0.01"}, 0),
        ("spec_decode_displaced_weight_ratio_bucket", {"preset": "balanced", "le": "0.02"}, 2),
        ("spec_decode_routing_prediction_total", {"result": "hit"}, 600),
        ("spec_decode_routing_prediction_total", {"result": "miss"}, 180),
        ("spec_decode_routing_prediction_total", {"result": "extra"}, 120),
        ("spec_decode_confidence_observed_total", {"depth": "1", "bin": "0.1", "accepted": "true"}, 0),
        ("spec_decode_confidence_observed_total", {"depth": "1", "bin": "0.1", "accepted": "false"}, 4),
        ("spec_decode_confidence_observed_total", {"depth": "1", "bin": "0.7", "accepted": "true"}, 6),
        ("spec_decode_confidence_observed_total", {"depth": "1", "bin": "0.7", "accepted": "false"}, 2),
        ("spec_decode_confidence_observed_total", {"depth": "2", "bin": "0.7", "accepted": "true"}, 2),
        ("spec_decode_confidence_observed_total", {"depth": "2", "bin": "0.8", "accepted": "false"}, 2),
        ("spec_decode_confidence_observed_total", {"depth": "7", "bin": "0.9", "accepted": "true"}, 0),
        ("spec_decode_confidence_expected_total", {"depth": "1", "bin": "0.7"}, 6),
        ("spec_decode_confidence_expected_total", {"depth": "1", "bin": "0.9"}, 5.5),
        ("spec_decode_confidence_expected_total", {"depth": "2", "bin": "0.8"}, 8.5),
        ("spec_decode_pauses_total", {}, 4),
        ("spec_decode_probes_total", {}, 10),
        ("spec_decode_controller_state", {"state": "probing"}, 1),
        ("spec_decode_controller_state", {"state": "off"}, 0),
        ("spec_decode_draft_length", {}, 2.5),
        ("spec_decode_graph_builds_total", {}, 6),
        ("cost_model_r2", {"target": "verify"}, 0.97),
        ("cost_model_r2", {"target": "draft"}, 0.9),
        ("cost_model_mape_ratio", {"target": "verify"}, 0.03),
        ("cost_model_mape_ratio", {"target": "draft"}, 0.06),
        ("cost_model_samples", {"target": "verify"}, 120),
        ("cost_model_samples", {"target": "draft"}, 80),
        *(("spec_decode_disabled_total", {"reason": reason}, 0.0) for reason in names.DISABLED_REASONS),
    ]
    found = await samples(rig)
    for name, labels, value in expected:
        key = (name, tuple(sorted(labels.items())))
        assert found[key] == pytest.approx(value), key


@pytest.mark.parametrize(
    ("preset", "budget", "displaced"), [("balanced", 0.05, 0.048), ("custom", 0.1, 0.09), ("fast", 0.2, 0.19)]
)
async def test_budgets_can_be_read_from_the_buckets_of_displaced_weight(
    rig: ServerRig, preset: str, budget: float, displaced: float
) -> None:
    for share in (displaced, budget + 0.001):
        report = msgspec.structs.replace(
            REPORT, preset=preset, displaced_weight=100 * share, n_token_layers=100
        )
        rig.metrics.on_finished(end(report))
    name = "s2moe_spec_decode_displaced_weight_ratio_bucket"
    assert await rig.sample(name, preset=preset, le=str(budget)) == 1


async def test_request_without_drafts_leaves_its_reason_and_no_sample(rig: ServerRig) -> None:
    rig.metrics.on_finished(end(REPORT))
    before = await samples(rig)
    rig.metrics.on_finished(end(NOTHING_DRAFTED))
    rig.metrics.on_finished(end(None))
    after = await samples(rig)
    changed = {
        (name, labels): value - before[(name, labels)]
        for (name, labels), value in after.items()
        if name.startswith(("spec_decode_", "cost_model_")) and value != before[(name, labels)]
    }
    # the cost model keeps what the earlier request showed
    assert changed == {
        ("spec_decode_disabled_total", (("reason", "unsupported"),)): 1,
        ("spec_decode_phase_seconds_total", (("method", "off"), ("phase", "verify"))): 1.5,
        ("spec_decode_controller_state", (("state", "probing"),)): -1,
        ("spec_decode_controller_state", (("state", "off"),)): 1,
    }


async def test_drafts_that_no_controller_paces_leave_its_draft_length(rig: ServerRig) -> None:
    rig.metrics.on_finished(end(REPORT))
    cascade = msgspec.structs.replace(REPORT, method="cascade", is_paced=False, draft_length=0.0)
    rig.metrics.on_finished(end(cascade))
    assert await rig.sample("s2moe_spec_decode_draft_length") == 2.5
    assert await rig.sample("s2moe_spec_decode_nodes_total", outcome="admitted") == 48


async def test_an_engine_of_another_version_cannot_invent_label_values(rig: ServerRig) -> None:
    strange = msgspec.structs.replace(
        REPORT,
        method="invented",
        preset="invented",
        disabled_reason="invented",
        controller_state="invented",
        accepted_by_depth=[1] * 20,
        judged_drafts=[[(1, 2, 0.5)] * 20] * 20,
        sample_seconds=-1e-9,
    )
    rig.metrics.on_finished(end(strange))
    rig.metrics.on_finished(end(msgspec.structs.replace(strange, method="s2moe")))
    text = (await rig.http.get("/metrics")).text
    assert "invented" not in text
    assert await rig.sample("s2moe_spec_decode_disabled_total", reason="other") == 2
    assert await rig.sample("s2moe_spec_decode_phase_seconds_total", phase="sample", method="s2moe") == 0
    labels = {"depth": "7", "bin": "0.9", "accepted": "false"}
    assert await rig.sample("s2moe_spec_decode_confidence_observed_total", **labels) == 0


async def test_server_shows_whether_requests_draft_by_default(start_server: StartServer) -> None:
    engine = FakeEngine(model=None)
    rig = await start_server(engine)
    assert await rig.sample("s2moe_spec_decode_enabled") == 0
    assert not any(name == "spec_decode_info" for name, _ in await samples(rig))
    drafting = {"speculation_method": "s2moe", "speculation_preset": "balanced"}
    engine.model = msgspec.structs.replace(MODEL, **drafting)
    assert await rig.sample("s2moe_spec_decode_enabled") == 1
    engine.model = msgspec.structs.replace(MODEL, speculation_limit="the model has no experts")
    assert await rig.sample("s2moe_spec_decode_enabled") == 0
    infos = {
        labels: value for (name, labels), value in (await samples(rig)).items() if name == "spec_decode_info"
    }
    assert infos == {(("limit", "the model has no experts"), ("method", "off"), ("preset", "")): 1}


async def test_gauges_fall_when_the_engine_goes(rig: ServerRig) -> None:
    rig.metrics.on_finished(end(REPORT))
    rig.metrics.on_state(EngineState.RESTARTING)
    assert await rig.sample("s2moe_spec_decode_controller_state", state="probing") == 0
    assert await rig.sample("s2moe_spec_decode_controller_state", state="off") == 1
    assert await rig.sample("s2moe_spec_decode_draft_length") == 0
    assert await rig.sample("s2moe_spec_decode_nodes_total", outcome="drafted") == 40


# ── requests feed it ──


def with_report(request: Generate) -> list[Any]:
    return [started(request), step(request, "Hello"), finished(request, speculation=REPORT)]


async def test_answers_are_counted_streamed_and_whole(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(with_report), alias="tiny")
    await rig.post(chat())
    await rig.post(chat(stream=True))
    labels = {"model": "tiny", "method": "s2moe"}
    assert await rig.sample("s2moe_spec_decode_accepted_tokens_total", **labels) == 24


async def test_cancelled_requests_are_counted_too(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless, report_of_aborted=REPORT))
    leaver = await rig.connect(chat("leaver", stream=True))
    await leaver.read_until(b'{"content":"x"}')
    leaver.leave()
    await rig.engine.until_aborted("leaver")
    await rig.until_idle()
    assert await rig.sample("s2moe_spec_decode_nodes_total", outcome="accepted") == 12
    assert await rig.sample("s2moe_spec_decode_request_acceptance_ratio_count", method="s2moe") == 1


async def test_failed_requests_are_counted_too(start_server: StartServer) -> None:
    report = msgspec.structs.replace(REPORT, disabled_reason="error")

    def script(request: Generate) -> list[Any]:
        failed = Failed(
            request_id=request.request_id,
            code="numeric_error",
            message="no logits",
            timings=Timings(speculation=report),
        )
        return [started(request), step(request, "Hello"), failed]

    rig = await start_server(FakeEngine(script))
    await rig.post(chat())
    assert await rig.sample("s2moe_spec_decode_nodes_total", outcome="accepted") == 12
    assert await rig.sample("s2moe_spec_decode_disabled_total", reason="error") == 1


async def test_step_of_several_tokens_is_shared_among_them(start_server: StartServer) -> None:
    def script(request: Generate) -> list[Any]:
        def piece(sampled_ns: int) -> Step:
            return msgspec.structs.replace(step(request, "x"), sampled_ns=sampled_ns)

        first = [piece(1), piece(1)]
        second = [0.3, *(piece(2) for _ in range(4))]
        return [started(request), *first, *second, 0.3, piece(3), finished(request, tokens=7)]

    rig = await start_server(FakeEngine(script))
    await rig.post(chat(stream=True))
    name = "s2moe_inter_token_latency_seconds"
    # four quarters of 0.3 s and one 0.3 s; the two of the first step waited for the prompt
    assert await rig.sample(f"{name}_count", model="demo") == 5
    assert await rig.sample(f"{name}_sum", model="demo") == pytest.approx(0.6, abs=0.15)
    assert await rig.sample(f"{name}_bucket", model="demo", le="0.06") == 0
    assert await rig.sample(f"{name}_bucket", model="demo", le="0.15") == 4
