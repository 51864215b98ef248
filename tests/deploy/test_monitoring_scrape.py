"""Prometheus with the files of deploy/monitoring in front of a running server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from monitoring_rig import (
    FakeEngine,
    Prometheus,
    ServeProcess,
    questions_beside_panels,
    questions_of_panels,
    questions_of_rules,
    rules,
    run_promtool,
    threaded_server,
    tool,
    until,
)
from prometheus_client.parser import text_string_to_metric_families

STORY = "Tell me a long story about a river and the people who live beside it."


@pytest.fixture(scope="module")
def server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """`s2moe serve` on the tiny demo model, most of whose experts fit, after two answers."""
    tool("prometheus")
    folder = tmp_path_factory.mktemp("monitored")
    arguments = ("--model", str(tiny_model_path), "--ctx-size", "512", "--memory-budget", "460MiB")
    process = ServeProcess(folder / "log", *arguments, environment={"S2MOE_CACHE_DIR": str(folder / "cache")})
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def prometheus(server: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("scraping") / "prometheus"
    with Prometheus(folder, f"127.0.0.1:{server.port}") as running:
        # scrapes before, between and after, so that a series which the first answer brought forth has a rate
        for _ in range(2):
            running.wait_scrape()
            assert server.chat(STORY, max_tokens=32).status_code == 200
        until(lambda: running.value("sum(s2moe_requests_total)") == 2, "a scrape of both answers")
        running.wait_scrape()
        yield running


def test_a_series_without_samples_has_no_value(prometheus: Prometheus) -> None:
    """What waits for a value must get over the time before the first scrape, and a failed one."""
    assert prometheus.value("s2moe_no_such_series") is None
    assert prometheus.value("vector(2)") == 2


def test_prometheus_scrapes_the_server_without_complaint(
    server: ServeProcess, prometheus: Prometheus
) -> None:
    assert prometheus.wait_health("up")["lastError"] == ""
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    names = {sample.name for family in families for sample in family.samples}
    prometheus.wait_scrape()
    assert names <= set(prometheus.data("label/__name__/values"))
    assert prometheus.complaints() == []


def test_promtool_finds_nothing_in_metrics_of_the_real_server(server: ServeProcess) -> None:
    assert run_promtool("check", "metrics", stdin=server.client.get("/metrics").text) == ""


def test_every_panel_gets_an_answer(prometheus: Prometheus) -> None:
    for question in questions_of_panels():
        prometheus.wait_values(question.expression, question.asker)
    for question in (*questions_of_rules(), *questions_beside_panels()):
        prometheus.values(question.expression)


def test_what_panels_show_is_what_happened(prometheus: Prometheus) -> None:
    shown = {
        each.asker: prometheus.wait_values(each.expression, each.asker) for each in questions_of_panels()
    }
    for asker in ("Time to first token A", "Between tokens B", "Read of one expert A"):
        (seconds,) = shown[asker].values()
        assert 0 < seconds < 60, asker
    assert 0 < shown["Hit rate A"][frozenset({("phase", "decode")})] <= 1
    (stall_share,) = shown["Stall share A"].values()
    assert 0 <= stall_share < 1.1
    assert shown["Step duration A"]
    assert any(math.isfinite(seconds) for seconds in shown["Step duration A"].values())
    (left_bytes,) = shown["Left of the budget A"].values()
    assert left_bytes > 0
    assert sum(shown["Controller A"].values()) == 1


def test_all_is_quiet_until_the_engine_is_killed(server: ServeProcess, prometheus: Prometheus) -> None:
    groups = prometheus.data("rules")["groups"]
    checked = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in checked} == {rule["alert"] for rule in rules()}
    until(
        lambda: all(r["health"] == "ok" for g in prometheus.data("rules")["groups"] for r in g["rules"]),
        "the evaluation of all rules",
    )
    assert prometheus.firing() == {}
    server.kill_engine()
    until(lambda: "S2moeEngineRestarted" in prometheus.firing(), "the alert")
    annotations = prometheus.firing()["S2moeEngineRestarted"]["annotations"]
    assert f"127.0.0.1:{server.port}" in annotations["summary"]
    assert "crash" in annotations["summary"]
    assert "docs/architecture.md" in annotations["description"]


def test_a_server_with_a_key_is_scraped_with_it_and_else_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("S2MOE_API_KEY_FILE", raising=False)
    with threaded_server(FakeEngine(), api_key="a-key") as rig:
        address = f"127.0.0.1:{rig.port}"
        with (
            Prometheus(tmp_path / "as-shipped", address) as without,
            Prometheus(tmp_path / "with-key", address, key="a-key") as with_key,
        ):
            with_key.wait_health("up")
            without.wait_health("down")
            until(lambda: "401" in without.target()["lastError"], "the refusal")
            # the rule and the configuration agree on the name of the job
            (rule,) = (each for each in rules() if each["alert"] == "S2moeServerUnreachable")
            until(lambda: without.value(rule["expr"]) == 0, "what the rule asks for")
            with_key.wait_scrape()
            until(lambda: with_key.values(rule["expr"]) == {}, "the end of what the rule asks for")
