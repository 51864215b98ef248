"""`/v1/responses` over HTTP, on a fake engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from event_order import check_response_events, named_events
from fake_engine import (
    Action,
    FakeEngine,
    Generate,
    endless,
    endless_prefill,
    finished,
    last_text,
    started,
    step,
)
from openai.types.responses import Response
from scripted_answers import answer, answer_with_calls, answer_with_logprobs
from server_rig import ServerRig, StartServer

from s2moe.engine.messages import ApplyTemplate, Failed
from s2moe.server.engine_client import EngineDiedError

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


async def respond(rig: ServerRig, path: str = PATH, **fields: Any) -> httpx.Response:
    return await rig.http.post(path, json={"model": "m", "input": "hi", **fields})


def thoughtful(request: Generate) -> Sequence[Action]:
    return answer(request, "Hello", reasoning="hm", cached=4, reasoning_tokens=1)


async def test_whole_response(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(thoughtful))
    reply = await respond(rig, metadata={"a": "b"})
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    Response.model_validate(body)
    assert body["id"].startswith("resp_")
    assert body["created_at"] > 1_700_000_000
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", "demo")
    assert body["metadata"] == {"a": "b"}
    reasoning, message = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Hello"
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert body["timings"]["cache_n"] == 4


@pytest.mark.parametrize("path", [PATH, "/responses"])
async def test_streamed_response(start_server: StartServer, path: str) -> None:
    rig = await start_server(FakeEngine(thoughtful))
    reply = await respond(rig, path, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    response = check_response_events(named_events(reply.content))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["status"] == "completed"
    assert "[DONE]" not in reply.text


async def test_summary_is_given_where_it_is_asked_for(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(thoughtful))
    reply = await respond(rig, stream=True, reasoning={"summary": "auto"})
    response = check_response_events(named_events(reply.content))
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "hm"}]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls(start_server: StartServer, stream: bool) -> None:
    rig = await start_server(FakeEngine(lambda r: answer_with_calls(r, ("look", {"a": 1}), before="I look")))
    reply = await respond(rig, stream=stream, tools=[TOOL])
    response = check_response_events(named_events(reply.content)) if stream else reply.json()
    message, call = response["output"]
    assert message["type"] == "message"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "look", {"a": 1})
    assert call["call_id"].startswith("call_")
    options = json.loads(rig.engine.requests[0].chat_options_json)
    assert [tool["function"]["name"] for tool in options["tools"]] == ["look"]
    assert options["parallel_tool_calls"] is True


async def test_tools_that_are_no_functions_are_skipped(
    rig: ServerRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="s2moe.server")
    tools = [{"type": "web_search"}, TOOL, {"type": "custom", "name": "apply_patch", "format": {}}]
    assert (await respond(rig, tools=tools, tool_choice="auto")).status_code == 200
    options = json.loads(rig.engine.requests[0].chat_options_json)
    assert [tool["function"]["name"] for tool in options["tools"]] == ["look"]
    (record,) = [each for each in caplog.records if "left out" in each.getMessage()]
    assert record.fields == {"types": ["web_search", "custom"]}  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_the_text_are_given_where_they_are_asked_for(
    start_server: StartServer, stream: bool
) -> None:
    rig = await start_server(FakeEngine(lambda r: answer_with_logprobs(r, ("Hel", -0.5), ("lo", -2.0))))
    reply = await respond(rig, stream=stream, include=[LOGPROBS], top_logprobs=2)
    response = check_response_events(named_events(reply.content)) if stream else reply.json()
    (part,) = response["output"][0]["content"]
    assert [(each["token"], each["logprob"], each["bytes"]) for each in part["logprobs"]] == [
        ("Hel", -0.5, list(b"Hel")),
        ("lo", -2.0, list(b"lo")),
    ]
    assert [[top["token"] for top in each["top_logprobs"]] for each in part["logprobs"]] == [
        ["Hel", "?"],
        ["lo", "?"],
    ]
    assert response["top_logprobs"] == 2
    assert rig.engine.requests[0].n_top_logprobs == 2


async def test_no_log_probabilities_unless_asked_for(rig: ServerRig) -> None:
    for fields in ({}, {"top_logprobs": 0}, {"include": []}, {"include": ["reasoning.encrypted_content"]}):
        body = (await respond(rig, **fields)).json()
        assert body["output"][0]["content"][0]["logprobs"] == []
        assert body["top_logprobs"] == 0
    assert [request.n_top_logprobs for request in rig.engine.requests] == [None] * 4
    await respond(rig, include=[LOGPROBS])
    assert rig.engine.requests[-1].n_top_logprobs == 0


async def test_limit_of_tokens_makes_the_response_incomplete(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, "Once", reason="length")))
    whole = (await respond(rig, max_output_tokens=2)).json()
    streamed = check_response_events(named_events((await respond(rig, stream=True)).content))
    for response in (whole, streamed):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert rig.engine.requests[0].max_tokens == 2


async def test_options_reach_the_engine(rig: ServerRig) -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    fields = {"temperature": 0, "seed": 7, "s2moe": {"preset": "exact"}, "reasoning": {"effort": "none"}}
    assert (await respond(rig, text={"format": form}, **fields)).status_code == 200
    request = rig.engine.requests[0]
    assert (request.sampling.temperature, request.sampling.seed) == (0, 7)
    assert request.speculation.preset == "exact"
    options = json.loads(request.chat_options_json)
    assert options["json_schema"] == schema
    assert options["enable_thinking"] is False


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "truncation": "auto", "include": ["reasoning.encrypted_content"], "user": "x"},
        {"include": ["web_search_call.results", "what comes next year"], "top_logprobs": None},
        {"previous_response_id": None, "conversation": None, "background": False, "top_logprobs": 0},
        {"service_tier": "auto", "prompt_cache_key": "k", "stream_options": {"include_obfuscation": False}},
        {"tools": [], "tool_choice": "auto", "metadata": None, "text": {}, "reasoning": {}},
    ],
)
async def test_harmless_fields_are_accepted(rig: ServerRig, fields: dict[str, Any]) -> None:
    assert (await respond(rig, **fields)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "include": ["reasoning.encrypted_content"]}, "top_logprobs"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
        ({"top_logprobs": -1, "include": [LOGPROBS]}, "top_logprobs"),
        ({"top_logprobs": True, "include": [LOGPROBS]}, "top_logprobs"),
        ({"include": ["output_text.logprobs"]}, "include"),
        ({"include": LOGPROBS}, "include"),
        ({"include": [7]}, "include[0]"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        (
            {"tools": [{"type": "mcp"}, TOOL], "tool_choice": {"type": "function", "name": "buy"}},
            "tool_choice",
        ),
        ({"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0]"),
        ({"instructions": "x", "input": [{"role": "robot", "content": ""}]}, "input[0].role"),
    ],
)
async def test_wrong_field_is_a_400_that_names_it(
    rig: ServerRig, fields: dict[str, Any], param: str, stream: bool
) -> None:
    reply = await respond(rig, stream=stream, **fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert f"`{param}`" in error["message"]
    assert rig.engine.requests == []


async def test_strict_model_is_404(start_server: StartServer) -> None:
    rig = await start_server(strict_model=True)
    reply = await respond(rig)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_token_is_an_http_error_in_the_clients_words(
    start_server: StartServer, stream: bool
) -> None:
    def refuse(request: Generate) -> Sequence[Action]:
        message = "json_schema at #/x: pattern is not supported"
        return [
            Failed(request_id=request.request_id, code="invalid_grammar", message=message, param="messages")
        ]

    rig = await start_server(FakeEngine(refuse))
    reply = await respond(rig, stream=stream)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_grammar", "input")
    assert error["message"].startswith("text.format.schema at #/x")


async def test_failure_after_the_first_token_ends_the_stream_with_response_failed(
    start_server: StartServer,
) -> None:
    rig = await start_server(
        FakeEngine(
            lambda r: [started(r), step(r, "a"), EngineDiedError("engine died", generation_began=True)]
        )
    )
    events = named_events((await respond(rig, stream=True)).content)
    assert check_response_events(events)["error"]["code"] == "engine_died"
    assert (await respond(rig)).status_code == 500


async def test_failure_after_the_wait_for_the_first_event_is_a_whole_sequence(
    start_server: StartServer,
) -> None:
    rig = await start_server(
        FakeEngine(lambda r: [1.7, Failed(request_id=r.request_id, code="template_error", message="bad")])
    )
    reply = await respond(rig, stream=True)
    assert reply.text.startswith(": ping\n\n")
    assert check_response_events(named_events(reply.content))["error"]["code"] == "template_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [endless, endless_prefill])
async def test_client_that_leaves_is_aborted(start_server: StartServer, script: Any, stream: bool) -> None:
    def others_end(request: Generate) -> Sequence[Action]:
        return (
            list(script(request)) if last_text(request) == "leaves" else [started(request), finished(request)]
        )

    rig = await start_server(FakeEngine(others_end))
    leaver = await rig.connect({"input": "leaves", "stream": stream}, PATH)
    await rig.engine.until_running("leaves")
    if stream:
        await leaver.read_until(b"response.in_progress")
    leaver.leave()
    await rig.engine.until_aborted("leaves")
    await rig.until_idle()
    assert (await respond(rig)).status_code == 200


async def test_full_queue_is_429(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless), queue_size=1)
    first = await rig.connect({"input": "first"}, PATH)
    await rig.engine.until_running("first")
    second = await rig.connect({"input": "second"}, PATH)
    await rig.until_waiting(1)
    reply = await respond(rig)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
    assert int(reply.headers["retry-after"]) >= 1
    for each in (first, second):
        each.leave()


@pytest.mark.parametrize("path", [f"{PATH}/input_tokens", "/responses/input_tokens"])
async def test_input_tokens_are_counted_without_an_answer(rig: ServerRig, path: str) -> None:
    reply = await respond(rig, path, instructions="be brief", tools=[TOOL])
    rendered = "system: be brief\nuser: hi\n"
    assert reply.json() == {"object": "response.input_tokens", "input_tokens": len(rendered)}
    (query,) = rig.engine.queries
    assert isinstance(query, ApplyTemplate)
    assert json.loads(query.chat_options_json)["tools"][0]["function"]["name"] == "look"
    assert rig.engine.requests == []


async def test_requests_are_counted_under_their_api(rig: ServerRig) -> None:
    await respond(rig)
    await respond(rig, stream=True)
    await respond(rig, tools=[TOOL, TOOL])
    for stream in ("true", "false"):
        labels = {"model": "demo", "api": "responses", "stream": stream, "finish": "stop"}
        assert await rig.sample("s2moe_requests_total", **labels) == 1
    labels = {"model": "demo", "api": "responses", "stream": "false", "finish": "error"}
    assert await rig.sample("s2moe_requests_total", **labels) == 1


async def test_openapi_document_describes_the_endpoint(rig: ServerRig) -> None:
    document = (await rig.http.get("/openapi.json")).json()
    operation = document["paths"][PATH]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert schema["required"] == ["input"]
    kinds = {kind.get("type") for kind in schema["properties"]["input"]["anyOf"]}
    assert kinds == {"string", "array"}
    assert "likeliest" in schema["properties"]["temperature"]["description"]
    assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= set(operation["responses"])
    answer_reference = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    declared = document["components"]["schemas"][answer_reference.rpartition("/")[2]]
    body = (await respond(rig)).json()
    assert set(body) <= set(declared["properties"])
    assert set(declared["required"]) <= set(body)


async def test_two_streams_do_not_mix(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, last_text(r) * 5)))
    replies = await asyncio.gather(*(respond(rig, input=text, stream=True) for text in ("one", "two")))
    texts = [
        check_response_events(named_events(reply.content))["output"][0]["content"][0]["text"]
        for reply in replies
    ]
    assert texts == ["one" * 5, "two" * 5]


async def test_input_of_nothing_but_encrypted_reasoning_is_named(rig: ServerRig) -> None:
    reply = await respond(rig, input=[{"type": "reasoning", "summary": [], "encrypted_content": "xyz"}])
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "input")
    assert "`input`: nothing in it is for the model" in error["message"]
