"""The live figures: what they show, and that they cost nothing when nobody looks."""

from __future__ import annotations

import time

import msgspec
from browser_page import BrowserPage, OpenPage
from fake_engine import MODEL, FakeEngine, endless, finished, started, step
from page_scripts import MIB, stats
from speculation_reports import REPORT

from s2moe.engine.messages import CostFit, MemoryPool, Plan
from s2moe.server.engine_client import EngineState


def until_text(page: BrowserPage, selector: str, text: str) -> None:
    page.until(lambda: text in page.text(selector), f"{text!r} in {selector}")


def test_figures_follow_the_metrics(open_page: OpenPage) -> None:
    page = open_page()
    metrics = page.server.rig.metrics
    until_text(page, "#hits-more", "no expert cache")
    page.server.do(lambda: metrics.on_stats(stats(hits=50, misses=50)))
    until_text(page, "#hits", "50.0 %")
    page.server.do(lambda: metrics.on_stats(stats(hits=90, misses=10)))
    until_text(page, "#hits", "90.0 %")
    assert page.text("#hits-more") == "70.0 % since the start, 96 of 128 slots filled"
    assert (page.text("#kv"), page.text("#kv-more")) == ("1,234", "of 4,096")
    assert page.text("#queue") == "0 of 16 waiting"
    assert [each.text.replace("\n", " ") for each in page.all("#pools tr")] == [
        "Weights 100 MiB / 100 MiB",
        "KV cache 60 MiB / 50 MiB",
        "Expert cache 140 MiB / 250 MiB",
        "Together 300 MiB / 400 MiB",
    ]
    assert [each.get_attribute("aria-label") for each in page.all("#pools meter.over")] == [
        "KV cache, used of its budget"
    ]
    assert page.text("#host-memory") == "512 MiB of 2 GiB free on this machine"


def test_pool_that_is_gone_leaves_the_table(open_page: OpenPage) -> None:
    page = open_page()
    page.server.do(lambda: page.server.rig.metrics.on_stats(stats()))
    page.until(lambda: len(page.all("#pools tr")) == 4, "the pools")
    none = [MemoryPool(pool=name) for name in ("weights", "kv", "expert_cache")]
    page.server.do(
        lambda: page.server.rig.metrics.on_stats(msgspec.structs.replace(stats(), memory_pools=none))
    )
    page.until(lambda: page.all("#pools tr") == [], "no pools")


def test_speed_is_live_while_an_answer_is_made(open_page: OpenPage) -> None:
    page = open_page(FakeEngine(endless))
    page.ask("go on")
    until_text(page, "#speed-more", "now")
    assert (
        5 < float(page.text("#speed").split()[0]) < 60
    )  # a token each 20 ms, less the time before the first
    until_text(page, "#queue-more", "an answer is being made")


def test_last_answer_leaves_its_speed_and_acceptance(open_page: OpenPage) -> None:
    engine = FakeEngine(
        lambda request: [started(request), step(request, "Hi"), finished(request, speculation=REPORT)]
    )
    page = open_page(engine)
    page.ask_and_wait("hi")
    until_text(page, "#speed", "8.0 tok/s")
    assert page.text("#speed-more") == "last answer, prompt 20.0 tok/s"
    assert page.text("#acceptance") == "50 %"
    assert page.text("#acceptance-more").startswith("last answer, 2.50 tokens per drafting step")
    assert "50 % of drafts accepted" in page.text(".turn-facts")
    page.driver.refresh()
    until_text(page, "#acceptance-more", "since the start, 2.50 tokens per drafting step")
    assert page.text("#acceptance") == "50 %"


def test_quality_of_the_cost_model_is_shown(open_page: OpenPage) -> None:
    reports = iter([msgspec.structs.replace(REPORT, draft_fit=CostFit()), REPORT])
    engine = FakeEngine(
        lambda request: [started(request), step(request, "Hi"), finished(request, speculation=next(reports))]
    )
    page = open_page(engine)
    until_text(page, "#queue", "0 of 16 waiting")
    assert (page.text("#costs"), page.text("#costs-more")) == ("–", "nothing predicted yet")
    page.ask_and_wait("hi")
    until_text(page, "#costs", "3.0 %")
    assert page.text("#costs-more") == "verification, R² 0.97"
    page.ask_and_wait("hi")
    until_text(page, "#costs-more", "verification, R² 0.97; drafts 6.0 %, R² 0.90")


def test_waiting_requests_are_counted(open_page: OpenPage) -> None:
    page = open_page(FakeEngine(endless))
    page.ask("mine")
    page.until_answer_has("x")
    page.module(
        "api.js",
        "const api = new module.Api(() => '');"
        "window.other = new AbortController();"
        "const chat = api.chat({messages: [{role: 'user', content: 'other'}]}, window.other.signal);"
        "chat.next().catch(() => {});",
    )
    until_text(page, "#queue", "1 of 16 waiting")
    page.script("window.other.abort()")
    until_text(page, "#queue", "0 of 16 waiting")


def test_model_and_plan_are_described(open_page: OpenPage) -> None:
    model = msgspec.structs.replace(MODEL, speculation_method="s2moe", speculation_preset="balanced")
    plan = Plan(
        budget_bytes=400 * MIB, lines=["weights 100 MiB", "experts 250 MiB"], warnings=["It is tight."]
    )
    page = open_page(FakeEngine(model=model, plan=plan))
    until_text(page, "#model", "demo")
    facts = page.text("#model")
    for part in ("llama, Q4_0", "4,096 tokens", "4 of 16 per token", "s2moe, balanced"):
        assert part in facts
    assert page.text("#plan-text") == "weights 100 MiB\nexperts 250 MiB\nIt is tight."
    assert page.driver.title == "demo – s2moe"
    assert not page.shown("#plan-text")
    page.click("#plan summary")
    assert page.shown("#plan-text")


def test_state_of_the_engine_is_shown_and_announced(open_page: OpenPage) -> None:
    page = open_page()
    page.expected_problems = ["status of 503"]
    until_text(page, "#state-text", "ready")
    metrics, engine = page.server.rig.metrics, page.server.engine

    def change(state: EngineState, detail: str = "") -> None:
        engine.set_state(state, detail)
        metrics.on_state(state)

    page.server.do(lambda: change(EngineState.RESTARTING, "the engine was killed"))
    until_text(page, "#state-text", "restarting: the engine was killed")
    assert page.find("#state").get_attribute("data-state") == "restarting"
    assert "the engine was killed" in page.text("#announcements")
    page.server.do(lambda: change(EngineState.BUSY))
    until_text(page, "#state-text", "busy")


def test_hidden_page_asks_nothing(open_page: OpenPage) -> None:
    page = open_page()
    server = page.server
    page.until(lambda: server.n_requests("/metrics") >= 2, "the second look")
    page.hide(True)
    time.sleep(0.3)  # what was under way
    seen = server.n_requests("/metrics") + server.n_requests("/health")
    time.sleep(2.5)
    assert server.n_requests("/metrics") + server.n_requests("/health") == seen
    page.hide(False)
    page.until(lambda: server.n_requests("/metrics") + server.n_requests("/health") >= seen + 2, "a look")


def test_visible_page_looks_every_two_seconds(open_page: OpenPage) -> None:
    page = open_page()
    page.until(lambda: page.server.n_requests("/metrics") >= 1, "the first look")
    seen = page.server.n_requests("/metrics")
    time.sleep(5)
    assert 1 <= page.server.n_requests("/metrics") - seen <= 3


def test_labels_of_metrics_are_unescaped(open_page: OpenPage) -> None:
    page = open_page()
    text = 's2moe_x{a="1",b="q\\"\\\\\\n, }"} 2.5e3\n# HELP s2moe_x 1\ns2moe_x 1\n'
    found = page.module(
        "metrics.js",
        "const samples = new module.Samples(args[0], 0);"
        "return [samples.of('x'), samples.sum('x'), samples.sum('none')];",
        text,
    )
    assert found[0] == [{"labels": {"a": "1", "b": 'q"\\\n, }'}, "value": 2500}, {"labels": {}, "value": 1}]
    assert found[1:] == [2501, 0]
