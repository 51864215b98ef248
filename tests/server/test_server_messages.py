"""`/v1/messages` (Anthropic) over HTTP, on a fake engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest
from event_order import check_message_events, named_events
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
from scripted_answers import answer, answer_with_calls
from server_rig import ServerRig, StartServer

from s2moe.engine.messages import ApplyTemplate, Failed, Query, QueryFailed
from s2moe.server.engine_client import EngineDiedError, EngineState

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
HI = {"role": "user", "content": "hi"}
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
TAIL = [
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"a": 1}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}]},
]


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [HI], **fields}


async def send(rig: ServerRig, path: str = PATH, **fields: Any) -> httpx.Response:
    return await rig.http.post(path, json=body_of(**fields))


def assert_error(reply: httpx.Response, status: int, kind: str) -> str:
    """Returns the message."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == reply.headers["x-request-id"] == reply.headers["request-id"]
    return str(body["error"]["message"])


def thoughtful(request: Generate) -> Sequence[Action]:
    return answer(request, "Hello", reasoning="hm", cached=4, reasoning_tokens=1)


@pytest.mark.parametrize("path", [PATH, "/messages", f"{PATH}?beta=true"])
async def test_whole_message(start_server: StartServer, path: str) -> None:
    rig = await start_server(FakeEngine(thoughtful))
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x", "x-api-key": "any"}
    reply = await rig.http.post(path, json=body_of(), headers=headers)
    assert reply.status_code == 200
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    body = reply.json()
    assert body.pop("id").startswith("msg_")
    signature = body["content"][0].pop("signature")
    assert signature
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 3,
        },
    }


async def test_streamed_message(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(thoughtful))
    reply = await send(rig, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    events = named_events(reply.content)
    message = check_message_events(events)
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][1]["text"] == "Hello"
    assert events[0]["message"]["usage"]["input_tokens"] == 6
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert len([each for each in deltas if each["type"] == "text_delta"]) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_use(start_server: StartServer, stream: bool) -> None:
    calls = (("look", {"a": 1}), ("look", {"a": 2}))
    rig = await start_server(FakeEngine(lambda r: answer_with_calls(r, *calls, before="I look")))
    reply = await send(rig, stream=stream, tools=[TOOL], tool_choice={"type": "any"})
    message = check_message_events(named_events(reply.content)) if stream else reply.json()
    assert message["stop_reason"] == "tool_use"
    text, *uses = message["content"]
    assert text == {"type": "text", "text": "I look"}
    inputs = [json.loads(use["partial_json"]) if stream else use["input"] for use in uses]
    assert [(use["type"], use["name"]) for use in uses] == [("tool_use", "look")] * 2
    assert inputs == [{"a": 1}, {"a": 2}]
    assert len({use["id"] for use in uses}) == 2
    options = json.loads(rig.engine.requests[0].chat_options_json)
    assert options["tool_choice"] == "required"


async def test_conversation_reaches_the_engine(rig: ServerRig) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "Help."},
    ]
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    use = {"role": "assistant", "content": [thinking, *TAIL[0]["content"]]}
    reply = await send(rig, system=system, messages=[HI, use, TAIL[1]], stop_sequences=["END"], top_k=5)
    assert reply.status_code == 200
    (request,) = rig.engine.requests
    messages = json.loads(request.messages_json)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[0]["content"] == "Help."
    assert messages[2]["reasoning_content"] == "hm"
    assert json.loads(messages[2]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert (messages[3]["tool_call_id"], messages[3]["content"]) == ("toolu_1", "seen")
    assert (request.max_tokens, request.stop, request.sampling.top_k) == (9, ["END"], 5)


async def test_next_turn_begins_with_the_prompt_of_the_last_one(rig: ServerRig) -> None:
    """Claude Code's billing line differs in each turn; the prompt must not, or nothing of it is reused."""
    for turn in range(2):
        await send(rig, system=f"x-anthropic-billing-header: cch={turn};\nHelp.")
    first, second = (request.messages_json for request in rig.engine.requests)
    assert first == second


async def test_thinking_is_off_unless_asked_for(rig: ServerRig) -> None:
    await send(rig)
    await send(rig, thinking={"type": "enabled", "budget_tokens": 1024})
    options = [json.loads(request.chat_options_json)["enable_thinking"] for request in rig.engine.requests]
    assert options == [False, True]


async def test_last_message_of_the_assistant_is_continued(rig: ServerRig) -> None:
    reply = await send(rig, messages=[HI, {"role": "assistant", "content": "The answer is"}])
    assert reply.status_code == 200
    assert json.loads(rig.engine.requests[0].chat_options_json)["continue_final_message"] is True


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequence_is_named(start_server: StartServer, stream: bool) -> None:
    rig = await start_server(
        FakeEngine(
            lambda r: [started(r), step(r, "a"), msgspec.structs.replace(finished(r), stop_string="END")]
        )
    )
    reply = await send(rig, stream=stream, stop_sequences=["END"])
    message = check_message_events(named_events(reply.content)) if stream else reply.json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


async def test_limit_of_tokens(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, "Once", reason="length")))
    assert (await send(rig)).json()["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": 0}, "`max_tokens`"),
        ({"messages": []}, "`messages`"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images"),
        ({"messages": TAIL[1:]}, "`messages[0].content[0]`"),
        ({"messages": [HI, TAIL[0]]}, "`messages[1].content[0]`"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}, TOOL, TOOL]}, "`tools[2].name`"),
        ({"tool_choice": {"type": "any"}}, "`tool_choice`"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "buy"}}, "`tool_choice`"),
    ],
)
async def test_wrong_field_is_an_invalid_request_error(
    rig: ServerRig, fields: dict[str, Any], text: str, stream: bool
) -> None:
    assert text in assert_error(await send(rig, stream=stream, **fields), 400, "invalid_request_error")
    assert rig.engine.requests == []


async def test_missing_max_tokens_is_named(rig: ServerRig) -> None:
    reply = await rig.http.post(PATH, json={"messages": [HI]})
    assert "`max_tokens` is required" in assert_error(reply, 400, "invalid_request_error")


async def test_what_is_not_json_has_anthropics_shape_too(rig: ServerRig) -> None:
    for content in (b"{", b"", b'{"a": "\xff"}', b"[" * 100_000):
        for path in (PATH, COUNT):
            assert_error(await rig.http.post(path, content=content), 400, "invalid_request_error")


async def test_missing_routes_and_wrong_methods_have_anthropics_shape_too(rig: ServerRig) -> None:
    for path in (f"{PATH}/nothing", f"{PATH}/", "/messages/x"):
        assert_error(await rig.http.get(path), 404, "not_found_error")
    assert_error(await rig.http.get(PATH), 405, "invalid_request_error")
    other = (await rig.http.get("/v1/messagesx")).json()
    assert other["error"]["code"] == "not_found"


async def test_wrong_key_has_anthropics_shape_too(start_server: StartServer) -> None:
    rig = await start_server(api_key="right")
    for path in (PATH, COUNT):
        reply = await rig.http.post(path, json=body_of(), headers={"x-api-key": "wrong"})
        assert_error(reply, 401, "authentication_error")
    assert (await rig.http.post(PATH, json=body_of(), headers={"x-api-key": "right"})).status_code == 200


async def test_large_body_has_anthropics_shape_too(start_server: StartServer) -> None:
    rig = await start_server(max_body_size=2048)

    async def pieces() -> Any:
        for _ in range(30):
            yield b" " * 100

    assert_error(await send(rig, system="x" * 3000), 413, "request_too_large")
    assert_error(await rig.http.post(PATH, content=pieces()), 413, "request_too_large")


async def test_strict_model_is_not_found(start_server: StartServer) -> None:
    rig = await start_server(strict_model=True)
    for path in (PATH, COUNT):
        assert_error(await send(rig, path), 404, "not_found_error")


async def test_engine_that_loads_is_overloaded(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.LOADING, model=None))
    reply = await send(rig)
    assert_error(reply, 503, "overloaded_error")
    assert int(reply.headers["retry-after"]) >= 1


async def test_full_queue_is_a_rate_limit(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless), queue_size=1)
    first = await rig.connect(body_of(), PATH)
    await rig.engine.until_running("hi")
    second = await rig.connect(body_of(), PATH)
    await rig.until_waiting(1)
    reply = await send(rig)
    assert_error(reply, 429, "rate_limit_error")
    assert int(reply.headers["retry-after"]) >= 1
    for each in (first, second):
        each.leave()


@pytest.mark.parametrize("stream", [False, True])
async def test_long_prompt_has_the_words_that_claude_code_reads(
    start_server: StartServer, stream: bool
) -> None:
    rig = await start_server(
        FakeEngine(
            lambda r: [
                Failed(
                    request_id=r.request_id,
                    code="context_length_exceeded",
                    message="too long",
                    param="messages",
                    n_prompt_tokens=5000,
                    n_ctx=4096,
                )
            ]
        )
    )
    text = assert_error(await send(rig, stream=stream), 400, "invalid_request_error")
    assert text.startswith("prompt is too long: 5000 tokens > 4096 maximum")


async def test_failure_after_the_first_token_is_an_error_event(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(lambda r: [started(r), step(r, "a"), EngineDiedError("died", generation_began=True)])
    )
    reply = await send(rig, stream=True)
    events = named_events(reply.content)
    assert check_message_events(events)["error"]["type"] == "api_error"
    assert events[-1]["request_id"] == reply.headers["x-request-id"]
    assert_error(await send(rig), 500, "api_error")


async def test_bug_is_an_api_error_that_tells_nothing(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: [ValueError("secret")]))
    assert "secret" not in assert_error(await send(rig), 500, "api_error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [endless, endless_prefill])
async def test_client_that_leaves_is_aborted(start_server: StartServer, script: Any, stream: bool) -> None:
    def others_end(request: Generate) -> Sequence[Action]:
        return (
            list(script(request)) if last_text(request) == "leaves" else [started(request), finished(request)]
        )

    rig = await start_server(FakeEngine(others_end))
    leaves = {"role": "user", "content": "leaves"}
    leaver = await rig.connect(body_of(messages=[leaves], stream=stream), PATH)
    await rig.engine.until_running("leaves")
    if stream:
        await leaver.read_until(b'{"type":"ping"}')
    leaver.leave()
    await rig.engine.until_aborted("leaves")
    await rig.until_idle()
    assert (await send(rig)).status_code == 200


@pytest.mark.parametrize("path", [COUNT, "/messages/count_tokens"])
async def test_tokens_are_counted_without_an_answer(rig: ServerRig, path: str) -> None:
    body = {"model": "m", "system": "Help.", "messages": [HI], "tools": [TOOL]}
    reply = await rig.http.post(path, json=body)
    assert reply.json() == {"input_tokens": len("system: Help.\nuser: hi\n")}
    assert reply.headers["request-id"]
    (query,) = rig.engine.queries
    assert isinstance(query, ApplyTemplate)
    assert json.loads(query.chat_options_json)["tools"][0]["function"]["name"] == "look"
    assert rig.engine.requests == []


async def test_template_that_refuses_is_an_invalid_request_error(start_server: StartServer) -> None:
    def refuse(query: Query) -> QueryFailed:
        return QueryFailed(
            query_id=query.query_id,
            code="template_error",
            message="`messages[0]` is bad",
            param="messages[0]",
        )

    rig = await start_server(FakeEngine(answer=refuse))
    text = assert_error(await send(rig, COUNT, system="Help."), 400, "invalid_request_error")
    assert text == "`system` is bad"


async def test_requests_are_counted_under_their_api(rig: ServerRig) -> None:
    await send(rig)
    await send(rig, tools=[TOOL, TOOL])
    for finish in ("stop", "error"):
        labels = {"model": "demo", "api": "messages", "stream": "false", "finish": finish}
        assert await rig.sample("s2moe_requests_total", **labels) == 1


async def test_openapi_document_describes_the_endpoints(rig: ServerRig) -> None:
    document = (await rig.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, required in ((PATH, {"messages", "max_tokens"}), (COUNT, {"messages"})):
        operation = document["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = schemas[reference.rpartition("/")[2]]
        assert set(schema["required"]) == required
        error = operation["responses"]["429"]["content"]["application/json"]["schema"]["$ref"]
        assert set(schemas[error.rpartition("/")[2]]["properties"]) == {"type", "error", "request_id"}
    content = schemas["MessageTurn"]["properties"]["content"]["anyOf"]
    assert {kind.get("type") for kind in content} == {"string", "array", "null"}
