"""Speculation in requests and answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from fake_engine import FakeEngine, finished, started, step
from hypothesis import given
from hypothesis import strategies as st
from server_rig import ServerRig, StartServer, chat, chunks_of
from speculation_reports import NOTHING_DRAFTED, REPORT

from s2moe.engine.messages import Generate, Speculation, SpeculationReport
from s2moe.server.schema.s2moe_options import S2moeOptions
from s2moe.server.schema.speculation import Speculation as SpeculationSchema
from s2moe.server.stream.speculation import speculation_of

PAGE = Path(__file__).parents[2] / "docs" / "speculation.md"

OPTIONS: dict[str, Any] = {
    "speculation": "cascade",
    "preset": "fast",
    "exact": False,
    "draft_experts": 2,
    "max_nodes": 4,
    "reuse_strength": 0,
    "reuse_cap": 8,
    "error_budget": 0.25,
    "single_token_bias": True,
    "adaptive": False,
    "reuse_gating": True,
    "shared_context": False,
}
AS_SENT = Speculation(**{"method" if name == "speculation" else name: OPTIONS[name] for name in OPTIONS})

ANSWER = {
    "method": "s2moe",
    "preset": "balanced",
    "exact": False,
    "disabled_reason": None,
    "iterations": 8,
    "steps": 20,
    "drafted": 40,
    "admitted": 24,
    "accepted": 12,
    "acceptance_rate": 0.5,
    "acceptance_length": 2.5,
    "mean_tokens_per_step": 1.6,
    "admitted_by_depth": [12, 8, 4, 0, 0, 0, 0],
    "accepted_by_depth": [6, 5, 1, 0, 0, 0, 0],
    "acceptance_histogram": [2, 1, 4, 1, 0, 0, 0, 0],
    "reuse_ratio": 0.55,
    "reuse_ratio_ungated": 0.75,
    "experts_touched": 700,
    "misses_avoided": 40,
    "displaced_weight": 0.015,
    "error_budget": 0.05,
    "biased_rows": 0.25,
    "draft_seconds": 0.5,
    "verify_seconds": 2.0,
    "sample_seconds": 0.25,
    "stall_seconds": 1.0,
    "controller_state": "probing",
    "graph_builds": 3,
}


# ── requests ──


async def test_every_option_reaches_the_engine(rig: ServerRig) -> None:
    assert set(OPTIONS) == set(S2moeOptions.model_fields)
    assert (await rig.post(chat(s2moe=OPTIONS))).status_code == 200
    assert (await rig.post(chat(s2moe=OPTIONS, stream=True))).status_code == 200
    assert [request.speculation for request in rig.engine.requests] == [AS_SENT, AS_SENT]


@pytest.mark.parametrize("fields", [{}, {"s2moe": None}, {"s2moe": {}}, {"s2moe": dict.fromkeys(OPTIONS)}])
async def test_what_a_request_leaves_open_is_the_servers(rig: ServerRig, fields: dict[str, Any]) -> None:
    assert (await rig.post(chat(**fields))).status_code == 200
    assert rig.engine.requests[0].speculation == Speculation()


@pytest.mark.parametrize("method", ["s2moe", "expert-skip", "cascade", "off"])
async def test_a_request_may_choose_each_method(rig: ServerRig, method: str) -> None:
    await rig.post(chat(s2moe={"speculation": method}))
    assert rig.engine.requests[0].speculation == Speculation(method=method)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("speculation", "eagle"),
        ("speculation", True),
        ("preset", "custom"),
        ("exact", "yes"),
        ("exact", 1),
        ("draft_experts", -1),
        ("draft_experts", 1.5),
        ("draft_experts", True),
        ("max_nodes", 0),
        ("max_nodes", 8),
        ("max_nodes", "4"),
        ("reuse_strength", -0.1),
        ("reuse_strength", 10.1),
        ("reuse_cap", -1),
        ("error_budget", 1.01),
        ("error_budget", -0.01),
        ("single_token_bias", "on"),
        ("adaptive", 0),
        ("reuse_gating", "false"),
        ("shared_context", []),
    ],
)
async def test_wrong_option_is_named(rig: ServerRig, option: str, value: object) -> None:
    reply = await rig.post(chat(s2moe={option: value}))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", f"s2moe.{option}")
    assert f"`s2moe.{option}`" in error["message"]
    assert rig.engine.requests == []


@pytest.mark.parametrize("value", ["off", 1, True, [], [{"preset": "exact"}]])
async def test_field_that_is_no_object_is_named(rig: ServerRig, value: object) -> None:
    error = (await rig.post(chat(s2moe=value))).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "s2moe")


async def test_misspelt_option_is_an_error_with_a_suggestion(rig: ServerRig) -> None:
    reply = await rig.post(chat(s2moe={"max_node": 4, "preset": "exact"}))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "s2moe"
    assert "`max_node`" in error["message"]
    assert "did you mean `max_nodes`?" in error["message"]
    assert rig.engine.requests == []


async def test_unknown_options_are_all_named_but_not_at_any_length(rig: ServerRig) -> None:
    message = (await rig.post(chat(s2moe={"qqq": 1, "{x}": 2}))).json()["error"]["message"]
    assert "`qqq`, `{x}`" in message
    assert all(name in message for name in OPTIONS)
    many = {f"{index}{'x' * 1000}": index for index in range(1000)}
    assert len((await rig.post(chat(s2moe=many))).json()["error"]["message"]) < 600


async def test_openai_client_sends_options_and_reads_the_report(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(with_report(REPORT)))
    call: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": "hi"}],
        "extra_body": {"s2moe": {"preset": "exact", "max_nodes": 3}},
    }
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(**call)
        chunks = [chunk async for chunk in await client.chat.completions.create(**call, stream=True)]
        wrong = {**call, "extra_body": {"s2moe": {"max_nodes": 9}}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**wrong)
    assert caught.value.param == "s2moe.max_nodes"
    assert (answer.model_extra or {})["speculation"] == ANSWER
    assert (chunks[-1].model_extra or {})["speculation"] == ANSWER
    sent = Speculation(preset="exact", max_nodes=3)
    assert [request.speculation for request in rig.engine.requests] == [sent, sent]


# ── answers ──


def with_report(report: SpeculationReport | None) -> Any:
    def script(request: Generate) -> list[Any]:
        return [started(request), step(request, "Hello"), finished(request, speculation=report)]

    return script


async def test_whole_answer_says_what_drafts_did(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(with_report(REPORT)))
    body = (await rig.post(chat())).json()
    assert body["speculation"] == ANSWER
    assert set(ANSWER) == set(SpeculationSchema.model_fields)
    SpeculationSchema.model_validate(body["speculation"], strict=True)
    assert (body["timings"]["draft_n"], body["timings"]["draft_n_accepted"]) == (24, 12)


@pytest.mark.parametrize("include_usage", [False, True])
async def test_stream_says_it_once_beside_timings(start_server: StartServer, include_usage: bool) -> None:
    rig = await start_server(FakeEngine(with_report(REPORT)))
    body = chat(stream=True, stream_options={"include_usage": include_usage})
    chunks = chunks_of((await rig.post(body)).text)
    assert chunks[-1]["speculation"] == ANSWER
    assert chunks[-1]["timings"]["draft_n"] == 24
    assert all("speculation" not in chunk and "timings" not in chunk for chunk in chunks[:-1])


async def test_answer_without_a_speculator_says_nothing_of_it(rig: ServerRig) -> None:
    body = (await rig.post(chat())).json()
    assert "speculation" not in body
    assert not any(key.startswith("draft") for key in body["timings"])
    assert "speculation" not in chunks_of((await rig.post(chat(stream=True))).text)[-1]


async def test_answer_in_which_nothing_was_drafted_has_nulls_and_the_reason(
    start_server: StartServer,
) -> None:
    rig = await start_server(FakeEngine(with_report(NOTHING_DRAFTED)))
    body = (await rig.post(chat())).json()
    speculation = body["speculation"]
    assert (speculation["method"], speculation["disabled_reason"]) == ("off", "unsupported")
    assert speculation["mean_tokens_per_step"] == 1.0
    nulls = {key for key, value in speculation.items() if value is None}
    assert nulls == {
        "preset",
        "acceptance_rate",
        "acceptance_length",
        "reuse_ratio",
        "reuse_ratio_ungated",
        "displaced_weight",
        "biased_rows",
    }
    assert "draft_n" not in body["timings"]


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({"error_budget": 0.0, "n_biased_rows": 0}, True),
        ({"method": "off", "n_biased_rows": 0}, True),
        # allowed to bend, though it did not this time; bent before an error switched drafting off
        ({"error_budget": 0.05, "n_biased_rows": 0}, False),
        ({"method": "off", "n_biased_rows": 1}, False),
        ({"error_budget": 0.0, "n_biased_rows": 1}, False),
    ],
)
def test_exact_is_claimed_only_when_it_was_demanded_and_kept(changes: dict[str, Any], exact: bool) -> None:
    assert speculation_of(msgspec.structs.replace(REPORT, **changes))["exact"] is exact


COUNT = st.integers(0, 2)


@given(st.tuples(COUNT, COUNT, COUNT, COUNT, COUNT, COUNT))
def test_no_ratio_is_ever_not_a_number(counts: tuple[int, ...]) -> None:
    iterations, steps, admitted, rows, layers, committed = counts
    report = SpeculationReport(
        n_iterations=iterations,
        n_steps=steps,
        n_admitted=admitted,
        n_row_experts=rows,
        n_token_layers=layers,
        n_committed_rows=committed,
    )
    answer = speculation_of(report)
    assert (answer["acceptance_rate"] is None) == (admitted == 0)
    assert (answer["acceptance_length"] is None) == (iterations == 0)
    assert (answer["reuse_ratio"] is None) == (answer["reuse_ratio_ungated"] is None) == (rows == 0)
    assert (answer["displaced_weight"] is None) == (layers == 0)
    SpeculationSchema.model_validate(answer)


# ── the page ──


def test_page_lists_every_option_and_every_key() -> None:
    page = PAGE.read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    for title, known in (
        ("Requests", set(S2moeOptions.model_fields)),
        ("The speculation object", set(SpeculationSchema.model_fields)),
    ):
        cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", sections[title], re.MULTILINE)
        listed = [name for cell in cells for name in re.findall(r"\w+", cell)]
        assert sorted(listed) == sorted(known), title
