"""/metrics: complete from the start, well named, right after requests."""

from __future__ import annotations

import re

import pytest
from fake_engine import MODEL, Action, FakeEngine, Generate, finished, started, step
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from scripted_answers import call_steps
from server_rig import CHAT, ServerRig, StartServer, chat

from s2moe.engine.messages import (
    STEP_DURATION_BOUNDS_SECONDS,
    EngineStats,
    Failed,
    ServingDevice,
    StepDurations,
    Timings,
)
from s2moe.server import metrics as names
from s2moe.server.engine_client import EngineState

FAMILIES = [
    "build_info",
    "model_info",
    "http_requests",
    "http_request_duration_seconds",
    "requests",
    "request_failures",
    "requests_running",
    "requests_waiting",
    "queue_capacity",
    "requests_rejected",
    "request_cancellations",
    "cancellation_duration_seconds",
    "request_queue_duration_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "prefill_duration_seconds",
    "decode_duration_seconds",
    "request_duration_seconds",
    "prompt_tokens",
    "generated_tokens",
    "tool_call_parse",
    "grammar_compile_duration_seconds",
    "grammar_failures",
    "decode_step_duration_seconds",
    "request_prompt_tokens",
    "request_generated_tokens",
    "prompt_cache_lookups",
    "kv_cache_tokens",
    "kv_cache_capacity_tokens",
    "engine_up",
    "engine_state",
    "engine_restarts",
    "engine_start_duration_seconds",
    "engine_heartbeat_age_seconds",
    "engine_last_start_timestamp_seconds",
    "ipc_messages",
    "ipc_bytes",
    "process_resident_memory_bytes",
]


async def families(rig: ServerRig) -> dict[str, object]:
    reply = await rig.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(reply.text)}


async def test_every_family_exists_from_the_start(rig: ServerRig) -> None:
    assert {f"s2moe_{name}" for name in FAMILIES} <= set(await families(rig))


async def test_every_label_value_exists_at_zero(rig: ServerRig) -> None:
    model = "demo"
    expected = [
        *(("request_failures_total", {"reason": r}) for r in names.FAILURE_REASONS),
        *(("requests_rejected_total", {"reason": r}) for r in names.REJECTION_REASONS),
        *(("engine_restarts_total", {"reason": r}) for r in names.RESTART_REASONS),
        *(("prompt_cache_lookups_total", {"result": r}) for r in names.CACHE_RESULTS),
        *(("prompt_tokens_total", {"model": model, "source": s}) for s in ("computed", "cached")),
        *(("generated_tokens_total", {"model": model, "kind": k}) for k in names.TOKEN_KINDS),
        *(("tool_call_parse_total", {"outcome": o}) for o in names.TOOL_CALL_OUTCOMES),
        *(("ipc_bytes_total", {"direction": d}) for d in names.DIRECTIONS),
        *(("ipc_messages_total", {"direction": d}) for d in names.DIRECTIONS),
        *(("engine_start_duration_seconds_count", {"phase": p}) for p in names.START_PHASES),
        *(
            ("request_cancellations_total", {"phase": p, "cause": c})
            for p in names.CANCELLATION_PHASES
            for c in names.CANCELLATION_CAUSES
        ),
        *(
            ("requests_total", {"model": model, "api": a, "stream": s, "finish": f})
            for a in names.APIS
            for s in ("true", "false")
            for f in names.FINISHES
        ),
        ("time_to_first_token_seconds_count", {"model": model}),
        ("request_queue_duration_seconds_count", {"model": model}),
        ("cancellation_duration_seconds_count", {}),
        ("http_requests_total", {"route": CHAT, "method": "POST", "code": "200"}),
        ("http_request_duration_seconds_count", {"route": CHAT}),
    ]
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in (await families(rig)).values()
        for sample in family.samples  # type: ignore[attr-defined]
    }
    for name, labels in expected:
        assert found[(f"s2moe_{name}", tuple(sorted(labels.items())))] == 0


async def test_no_refusal_of_a_key_begins_a_series(start_server: StartServer) -> None:
    """It would not be counted: to `increase()` the first sample of a series is where it starts."""
    rig = await start_server(api_key="right")

    async def refusals() -> dict[tuple[str, str], float]:
        text = (await rig.http.get("/metrics", headers=rig.key_headers)).text
        return {
            (sample.labels["route"], sample.labels["method"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "s2moe_http_requests_total" and sample.labels["code"] == "401"
        }

    before = await refusals()
    assert set(before.values()) == {0}
    requests = [
        *((method, CHAT) for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "PROPFIND")),
        *(("GET", path) for path in ("/metrics", "/v1/models", "/invented")),
    ]
    for method, path in requests:
        assert (await rig.http.request(method, path)).status_code == 401
    after = await refusals()
    assert set(after) == set(before)
    assert sum(after.values()) == len(requests)


async def test_names_keep_the_rules(rig: ServerRig) -> None:
    await rig.post(chat())
    for name, family in (await families(rig)).items():
        if name == "python_info":
            continue
        assert re.fullmatch(r"s2moe_[a-z0-9_]+", name)
        assert not re.search(r"_(ms|mb|gb|kb|percent|perc|created|per_second)$", name)
        assert family.documentation  # type: ignore[attr-defined]
        kind = family.type  # type: ignore[attr-defined]
        samples = {sample.name for sample in family.samples}  # type: ignore[attr-defined]
        if kind == "counter":
            assert samples == {f"{name}_total"}
        elif kind == "gauge":
            assert not name.endswith("_total")
            assert samples <= {name}
        else:
            assert kind == "histogram"
            assert name.endswith(("_seconds", "_tokens", "_ratio", "_length"))


async def test_counters_are_right_after_requests(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(
            lambda r: [
                started(r, prompt=20, cached=5),
                step(r, reasoning="t"),
                step(r, "ab", n_tokens=3),
                finished(r, "length", prompt=20, cached=5, tokens=5, reasoning_tokens=1),
            ]
        ),
        alias="tiny",
    )
    await rig.post(chat(stream=True))
    await rig.post(chat())
    sample = rig.sample
    model = {"model": "tiny"}
    for stream in ("true", "false"):
        assert await sample("s2moe_requests_total", **model, api="chat", stream=stream, finish="length") == 1
    assert await sample("s2moe_generated_tokens_total", **model, kind="reasoning") == 2
    assert await sample("s2moe_generated_tokens_total", **model, kind="content") == 8
    assert await sample("s2moe_request_prompt_tokens_sum", **model) == 40
    assert await sample("s2moe_request_generated_tokens_sum", **model) == 10
    assert await sample("s2moe_time_to_first_token_seconds_count", **model) == 2
    assert await sample("s2moe_inter_token_latency_seconds_count", **model) == 6
    assert await sample("s2moe_prefill_duration_seconds_sum", **model) == 1.0
    assert await sample("s2moe_decode_duration_seconds_sum", **model) == 0.5
    assert await sample("s2moe_request_duration_seconds_count", **model) == 2
    assert await sample("s2moe_request_queue_duration_seconds_count", **model) == 2
    assert await sample("s2moe_prompt_cache_lookups_total", result="partial") == 2
    assert await sample("s2moe_http_requests_total", route=CHAT, method="POST", code="200") == 2
    assert await sample("s2moe_requests_running") == 0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("context_length_exceeded", "context_length"),
        ("template_error", "template"),
        ("invalid_value", "invalid_request"),
        ("invalid_grammar", "bad_schema"),
        ("invalid_schema", "bad_schema"),
        ("insufficient_memory", "oom"),
        ("model_file_error", "model_file"),
        ("numeric_error", "numeric"),
        ("internal", "internal"),
    ],
)
async def test_failures_are_counted_by_reason(start_server: StartServer, code: str, reason: str) -> None:
    rig = await start_server(FakeEngine(lambda r: [Failed(request_id=r.request_id, code=code, message="m")]))
    await rig.post(chat())
    assert await rig.sample("s2moe_request_failures_total", reason=reason) == 1
    labels = {"model": "demo", "api": "chat", "stream": "false", "finish": "error"}
    assert await rig.sample("s2moe_requests_total", **labels) == 1


@pytest.mark.parametrize(
    ("code", "reason"), [("invalid_grammar", "grammar"), ("invalid_schema", "schema"), ("internal", None)]
)
async def test_grammars_that_fail_are_counted_by_what_held_them(
    start_server: StartServer, code: str, reason: str | None
) -> None:
    rig = await start_server(FakeEngine(lambda r: [Failed(request_id=r.request_id, code=code, message="m")]))
    await rig.post(chat())
    for each in ("grammar", "schema"):
        assert await rig.sample("s2moe_grammar_failures_total", reason=each) == (each == reason)


async def test_what_the_check_of_fields_refuses_is_an_http_answer_and_no_failed_request(
    start_server: StartServer,
) -> None:
    rig = await start_server()
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}
    reply = await rig.post(chat(response_format=schema))
    assert reply.json()["error"]["code"] == "invalid_schema"
    assert await rig.sample("s2moe_http_requests_total", route=CHAT, method="POST", code="400") == 1
    assert await rig.sample("s2moe_grammar_failures_total", reason="schema") == 0
    assert await rig.sample("s2moe_request_failures_total", reason="bad_schema") == 0


async def test_time_of_grammars_and_of_steps_is_counted(start_server: StartServer) -> None:
    n_buckets = len(STEP_DURATION_BOUNDS_SECONDS) + 1
    durations = {
        "draft": StepDurations(counts=[2, *[0] * (n_buckets - 1)], seconds=0.003),
        "plain": StepDurations(counts=[*[0] * (n_buckets - 1), 1], seconds=4.0),
    }

    def answer(request: Generate) -> list[Action]:
        end = finished(request)
        grammar_seconds = 0.25 if request.sampling.grammar else 0.0
        timings = replace(end.timings, grammar_seconds=grammar_seconds, step_durations=durations)
        return [started(request), replace(end, timings=timings)]

    rig = await start_server(FakeEngine(answer))
    await rig.post(chat())
    await rig.post(chat(grammar='root ::= "a"'))
    assert await rig.sample("s2moe_grammar_compile_duration_seconds_count") == 1
    assert await rig.sample("s2moe_grammar_compile_duration_seconds_sum") == 0.25
    name = "s2moe_decode_step_duration_seconds"
    assert await rig.sample(f"{name}_bucket", phase="draft", le="0.002") == 4
    assert await rig.sample(f"{name}_bucket", phase="plain", le="2.5") == 0
    assert await rig.sample(f"{name}_count", phase="plain") == 2
    assert await rig.sample(f"{name}_sum", phase="plain") == 8
    assert await rig.sample(f"{name}_count", phase="verify") == 0


async def test_durations_of_an_engine_of_another_version_are_passed_over(rig: ServerRig) -> None:
    durations = {
        "invented": StepDurations(counts=[1] * (len(STEP_DURATION_BOUNDS_SECONDS) + 1), seconds=1.0),
        "plain": StepDurations(counts=[1], seconds=1.0),
    }
    failed = Failed(request_id="r", code="internal", message="m", timings=Timings(step_durations=durations))
    rig.metrics.on_finished(failed)
    text = (await rig.http.get("/metrics")).text
    assert "invented" not in text
    assert await rig.sample("s2moe_decode_step_duration_seconds_count", phase="plain") == 0


async def test_tokens_and_outcomes_of_tool_calls_are_counted(start_server: StartServer) -> None:
    def cut_on_second_try(request: Generate) -> list[Action]:
        steps = list(call_steps(request, ("f", {"a": 1}), ("f", {})))
        if len(rig.engine.requests) == 2:
            steps = steps[:-1]
        reason = "tool_calls" if len(rig.engine.requests) == 1 else "length"
        return [
            started(request),
            step(request, "so"),
            *steps,
            finished(request, reason, tokens=1 + len(steps)),
        ]

    rig = await start_server(FakeEngine(cut_on_second_try))
    body = chat(tools=[{"type": "function", "function": {"name": "f"}}])
    n_tokens = 0
    for _ in range(2):
        n_tokens += (await rig.post(body)).json()["usage"]["completion_tokens"] - 1
    assert await rig.sample("s2moe_generated_tokens_total", model="demo", kind="tool") == n_tokens
    assert await rig.sample("s2moe_generated_tokens_total", model="demo", kind="content") == 2
    assert await rig.sample("s2moe_tool_call_parse_total", outcome="ok") == 3
    assert await rig.sample("s2moe_tool_call_parse_total", outcome="failed") == 1
    labels = {"model": "demo", "api": "chat", "stream": "false"}
    assert await rig.sample("s2moe_requests_total", **labels, finish="tool_calls") == 1
    assert await rig.sample("s2moe_requests_total", **labels, finish="length") == 1


async def test_request_that_is_refused_before_the_queue_is_counted(rig: ServerRig) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    await rig.post(chat(tools=tools, grammar='root ::= "a"'))
    assert await rig.sample("s2moe_request_failures_total", reason="invalid_request") == 1


async def test_engine_increments_add_up_and_gauges_are_replaced(rig: ServerRig) -> None:
    for kv_tokens in (100, 60):
        rig.metrics.on_stats(
            EngineStats(
                prompt_tokens_computed=7,
                prompt_tokens_cached=3,
                decode_steps=5,
                kv_cache_tokens=kv_tokens,
                kv_cache_capacity_tokens=4096,
            )
        )
    assert await rig.sample("s2moe_prompt_tokens_total", model="demo", source="computed") == 14
    assert await rig.sample("s2moe_prompt_tokens_total", model="demo", source="cached") == 6
    assert await rig.sample("s2moe_decode_steps_total") == 10
    assert await rig.sample("s2moe_kv_cache_tokens") == 60
    assert await rig.sample("s2moe_kv_cache_capacity_tokens") == 4096
    rig.metrics.on_state(EngineState.RESTARTING)
    assert await rig.sample("s2moe_kv_cache_tokens") == 0
    assert await rig.sample("s2moe_prompt_tokens_total", model="demo", source="computed") == 14


async def test_engine_life_is_shown(rig: ServerRig) -> None:
    observer = rig.metrics
    for state in EngineState:
        observer.on_state(state)
        shown = {s: await rig.sample("s2moe_engine_state", state=s) for s in EngineState}
        assert shown == {s: float(s is state) for s in EngineState}
        assert await rig.sample("s2moe_engine_up") == (state in ("ready", "busy"))
    observer.on_start_phase("spawn", 0.2)
    observer.on_start_phase("load", 3.0)
    observer.on_restart("oom")
    observer.on_message("to_engine", 100)
    observer.on_message("to_engine", 50)
    assert await rig.sample("s2moe_engine_start_duration_seconds_sum", phase="load") == 3.0
    assert await rig.sample("s2moe_engine_last_start_timestamp_seconds") > 1.7e9
    assert await rig.sample("s2moe_engine_restarts_total", reason="oom") == 1
    assert await rig.sample("s2moe_ipc_messages_total", direction="to_engine") == 2
    assert await rig.sample("s2moe_ipc_bytes_total", direction="to_engine") == 150
    assert await rig.sample("s2moe_engine_heartbeat_age_seconds") == 0.25


async def test_model_is_shown_once_it_is_known(start_server: StartServer) -> None:
    engine = FakeEngine(model=None)
    rig = await start_server(engine)
    labels = {
        "model": "demo",
        "architecture": "llama",
        "quantization": "Q4_0",
        "ctx": "4096",
        "n_experts": "16",
        "n_experts_used": "4",
        "spec_method": "off",
    }
    with pytest.raises(LookupError):
        await rig.sample("s2moe_model_info", **labels)
    engine.model = MODEL
    assert await rig.sample("s2moe_model_info", **labels) == 1
    text = (await rig.http.get("/metrics")).text
    assert text.count("\ns2moe_build_info{") == 1
    assert 'system_fingerprint="b1234-abcdef-p1"' in text


async def test_device_is_shown_once_it_is_known(start_server: StartServer) -> None:
    gpu = ServingDevice(kind="cuda", name="Fake GPU", compute_capability="8.9")
    labels = {"device": "cuda", "name": "Fake GPU", "compute_capability": "8.9"}
    engine = FakeEngine(model=None)
    rig = await start_server(engine)
    with pytest.raises(LookupError):
        await rig.sample("s2moe_device_info", **labels)
    engine.model = replace(MODEL, devices=[gpu, gpu])
    assert await rig.sample("s2moe_device_info", **labels) == 2
    engine.model = replace(MODEL, devices=[gpu])
    assert await rig.sample("s2moe_device_info", **labels) == 1


async def test_clients_cannot_invent_label_values(rig: ServerRig) -> None:
    await rig.post({**chat(), "model": "invented-model"})
    await rig.http.get("/invented-route")
    await rig.http.request("INVENT", "/health")
    text = (await rig.http.get("/metrics")).text
    assert "invent" not in text.lower()
    assert await rig.sample("s2moe_http_requests_total", route="other", method="GET", code="404") == 1
