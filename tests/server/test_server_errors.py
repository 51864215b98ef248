"""The error table: each way in which a request can be wrong, with status, type, code and param."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, started, step
from server_rig import CHAT, ServerRig, StartServer, chat, events_of

from s2moe.engine.messages import Failed, Finished


def assert_error(reply: httpx.Response, status: int, kind: str, code: str, param: str | None = None) -> str:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    body = reply.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert (error["type"], error["code"], error["param"]) == (kind, code, param)
    assert isinstance(error["message"], str)
    return str(error["message"])


def assert_invalid(reply: httpx.Response, code: str, param: str | None = None) -> str:
    return assert_error(reply, 400, "invalid_request_error", code, param)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"  \n",
        b"[]",
        b'"text"',
        b"{'a': 1}",
        b'{"messages": NaN}',
        b'{"temperature": 1e999}',
        b'{"a": "\xff\xfe"}',
        b'{"a": "\\ud800"}',
        "{}".encode("utf-16"),
        b'{"a":1}{"b":2}',
        pytest.param(b"[" * 100_000 + b"]" * 100_000, id="deep"),
        pytest.param(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, id="deep-object"),
    ],
)
async def test_what_is_not_a_json_object_is_invalid_json(rig: ServerRig, body: bytes) -> None:
    assert_invalid(await rig.post(content=body), "invalid_json")
    assert (await rig.post(chat())).status_code == 200


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        (message(content=7), "messages[0].content"),
        (message(content={"a": 1}), "messages[0].content"),
        ({"messages": [{"role": "user", "text": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": "system"}]}, "messages[0]"),
        (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content"),
        (message(content=[{"type": "text"}]), "messages[0].content"),
        (message(content=["text"]), "messages[0].content"),
        (message(role="tool"), "messages[0]"),
        (message(role="function"), "messages[0].role"),
        (message(role="wizard {x}"), "messages[0].role"),
        (message(role=1), "messages[0].role"),
        (message(role=None), "messages[0].role"),
        (message(tool_calls=[{"id": "x", "function": {"name": "f", "arguments": "{}"}}]), "messages[0]"),
        (message(role="assistant", function_call={"name": "f"}), "messages[0].function_call"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": "x"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": -1.0}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"grammar": 5}, "grammar"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"model": 5}, "model"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "root ::= 'a'"}, "ebnf"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"reasoning_format": "none"}, "reasoning_format"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs"),
        ({"enable_thinking": "false"}, "enable_thinking"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"return_progress": 1}, "return_progress"),
    ],
)
async def test_wrong_field_is_named(rig: ServerRig, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        reply = await rig.post({**chat(), "stream": stream, **fields})
        text = assert_invalid(reply, "invalid_value", param)
        assert param in text
    assert rig.engine.requests == []


HUGE = 10**400
DEEP = b"[" * 700 + b"]" * 700
HI = b'{"messages": [{"role": "user", "content": "hi"}], %s}'


def hostile(body: bytes, param: str | None, code: str = "invalid_value") -> Any:
    """`param`, `code`: of the error."""
    return pytest.param(body, code, param, id=f"{param} {body[-24:].decode(errors='replace')}")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        *(
            hostile(HI % (b'"%s": %d' % (name.encode(), sign * HUGE)), name)
            for name in ("temperature", "top_k", "n", "top_logprobs", "max_tokens", "repeat_penalty")
            for sign in (1, -1)
            if (name, sign) != ("max_tokens", 1)
        ),
        *(
            hostile(HI % (b'"%s": %s' % (name.encode(), DEEP)), name)
            for name in ("chat_template_kwargs", "response_format", "logit_bias", "s2moe", "stop")
        ),
        hostile(HI % (b'"tools": %s' % DEEP), "tools[0]"),
        hostile(b'{"messages": [{"role": "user", "content": %s}]}' % DEEP, "messages[0].content"),
        hostile(
            b'{"messages": [{"role": "user", "content": [{"type": "text", "text": %s}]}]}' % DEEP,
            "messages[0].content",
        ),
        hostile(b'{"messages": [{"role": %s, "content": "hi"}]}' % DEEP, "messages[0].role"),
        hostile(b'{"messages": %s}' % DEEP, "messages[0]"),
        hostile(b'{"messages": [%s]}' % b",".join([b'{"role": "user", "content": ""}'] * 2049), "messages"),
        hostile(b'{"messages": [%s]}' % b",".join([b"0"] * 100_000), "messages[0]"),
        hostile(
            HI % (b'"tools": [%s]' % b",".join([b"{}"] * 100_000)),
            "tools[0].type",
            "missing_required_parameter",
        ),
        hostile(
            HI % (b'"logit_bias": {%s}' % b",".join(b'"x%d": 1' % i for i in range(50_000))), "logit_bias"
        ),
        hostile(HI % (b'"chat_template_kwargs": {"a": 1%s}' % (b"0" * 5000)), None, "invalid_json"),
        hostile(b'{"messages": [{"role": "user", "content": "\xc3\x28"}]}', None, "invalid_json"),
        hostile(b'{"messages": [{"role": "user", "content": "\\udc00"}]}', None, "invalid_json"),
    ],
)
async def test_hostile_body_is_a_400_that_names_the_field_and_soon(
    rig: ServerRig, body: bytes, code: str, param: str | None
) -> None:
    async with asyncio.timeout(5):
        reply = await rig.post(content=body)
    assert_invalid(reply, code, param)
    assert len(reply.content) < 2000
    assert rig.engine.requests == []
    assert (await rig.post(chat())).status_code == 200


@pytest.mark.parametrize(
    "field",
    [b'"max_tokens": %d' % HUGE, b'"chat_template_kwargs": {"a": %d}' % 10**4000],
    ids=["limit", "variable"],
)
async def test_numbers_without_a_bound_are_accepted(rig: ServerRig, field: bytes) -> None:
    async with asyncio.timeout(5):
        assert (await rig.post(content=HI % field)).status_code == 200


async def test_missing_messages_are_named(rig: ServerRig) -> None:
    assert_invalid(await rig.post({"model": "m"}), "missing_required_parameter", "messages")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"logprobs": False, "top_logprobs": 0, "n": 1, "tools": [], "functions": None},
        {"functions": [], "function_call": None, "tool_choice": "none", "parallel_tool_calls": True},
        {"tool_choice": "auto", "stream_options": {"continuous_usage_stats": True}},
        {"cache_prompt": False, "timings_per_token": True, "reasoning_format": "auto"},
        {"max_tokens": 10**30, "json_schema": None, "guided_json": {}},
        {"seed": 2**70, "temperature": 2, "top_k": 0, "min_p": 0},
        {"modalities": ["text"], "audio": None, "web_search_options": None, "regex": ""},
        {"stop": [], "logit_bias": {}, "user": "x", "metadata": {"a": [1]}, "store": True},
    ],
)
async def test_harmless_values_are_accepted(rig: ServerRig, fields: dict[str, Any]) -> None:
    assert (await rig.post(chat(**fields))).status_code == 200


async def test_byte_order_mark_and_form_content_type_are_tolerated(rig: ServerRig) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(chat()).encode()
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert (await rig.post(content=body, headers=headers)).status_code == 200


async def test_web_page_cannot_post_without_preflight(rig: ServerRig) -> None:
    headers = {"content-type": "text/plain", "origin": "http://evil.example"}
    reply = await rig.post(content=json.dumps(chat()).encode(), headers=headers)
    assert_error(reply, 415, "invalid_request_error", "unsupported_media_type")
    assert rig.engine.requests == []


async def test_unknown_route_and_wrong_method(rig: ServerRig) -> None:
    for path in ("/v1/nothing", "/nothing", "/v1/chat/completions/"):
        assert_error(await rig.http.get(path), 404, "not_found_error", "not_found")
    reply = await rig.http.get(CHAT)
    assert_error(reply, 405, "invalid_request_error", "method_not_allowed")
    assert reply.headers["allow"] == "POST"


async def test_body_beyond_the_limit_is_413_by_its_length(start_server: StartServer) -> None:
    rig = await start_server(max_body_size=2048)
    reply = await rig.post(chat("x" * 3000))
    text = assert_error(reply, 413, "invalid_request_error", "request_too_large")
    assert "2048" in text
    assert (await rig.post(chat("x" * 1000))).status_code == 200


async def test_body_beyond_the_limit_is_413_without_a_length(start_server: StartServer) -> None:
    rig = await start_server(max_body_size=2048)

    async def pieces() -> Any:
        for _ in range(30):
            yield b" " * 100

    assert_error(await rig.post(content=pieces()), 413, "invalid_request_error", "request_too_large")


async def test_model_is_any_name_unless_strict(start_server: StartServer) -> None:
    rig = await start_server(alias="tiny")
    for model in ("gpt-4o", "tiny", None):
        assert (await rig.post({**chat(), "model": model})).json()["model"] == "tiny"
    strict = await start_server(alias="tiny", strict_model=True)
    assert_error(
        await strict.post({**chat(), "model": "gpt-4o"}), 404, "not_found_error", "model_not_found", "model"
    )
    assert (await strict.post({**chat(), "model": "tiny"})).status_code == 200
    assert (await strict.post({**chat(), "model": None})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "kind", "code"),
    [
        ({"code": "template_error", "message": "bad"}, 400, "invalid_request_error", "template_error"),
        ({"code": "invalid_grammar", "message": "bad"}, 400, "invalid_request_error", "invalid_grammar"),
        ({"code": "insufficient_memory", "message": "bad"}, 503, "server_error", "insufficient_memory"),
        ({"code": "model_file_error", "message": "bad"}, 500, "server_error", "model_file_error"),
        ({"code": "numeric_error", "message": "bad"}, 500, "server_error", "numeric_error"),
        ({"code": "internal", "message": "bad"}, 500, "server_error", "internal_error"),
    ],
)
async def test_failure_before_the_first_token_keeps_its_status(
    start_server: StartServer, failure: dict[str, Any], status: int, kind: str, code: str, stream: bool
) -> None:
    rig = await start_server(FakeEngine(lambda r: [Failed(request_id=r.request_id, **failure)]))
    assert assert_error(await rig.post(chat(stream=stream)), status, kind, code) == "bad"


@pytest.mark.parametrize("stream", [False, True])
async def test_context_overflow_has_the_words_and_numbers_that_clients_read(
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
    reply = await rig.post(chat(stream=stream))
    text = assert_invalid(reply, "context_length_exceeded", "messages")
    assert "maximum context length is 4096 tokens" in text
    assert reply.json()["error"]["n_prompt_tokens"] == 5000
    assert reply.json()["error"]["n_ctx"] == 4096


async def test_failure_after_the_first_token_is_an_error_event_without_done(
    start_server: StartServer,
) -> None:
    rig = await start_server(
        FakeEngine(
            lambda r: [
                started(r),
                step(r, "a"),
                Failed(request_id=r.request_id, code="internal", message="kaput"),
            ]
        )
    )
    reply = await rig.post(chat(stream=True))
    assert reply.status_code == 200
    events = events_of(reply.text)
    assert json.loads(events[-1]) == {
        "error": {"message": "kaput", "type": "server_error", "param": None, "code": "internal_error"}
    }
    assert "[DONE]" not in events
    whole = await rig.post(chat())
    assert_error(whole, 500, "server_error", "internal_error")
    assert whole.headers["x-should-retry"] == "false"


async def test_failure_after_the_wait_for_the_first_event_is_an_error_event(
    start_server: StartServer,
) -> None:
    rig = await start_server(
        FakeEngine(lambda r: [1.7, Failed(request_id=r.request_id, code="template_error", message="bad")])
    )
    reply = await rig.post(chat(stream=True))
    assert reply.status_code == 200
    assert reply.text.startswith(": ping\n\n")
    (event,) = events_of(reply.text)
    assert json.loads(event)["error"]["code"] == "template_error"


async def test_engine_never_adds_a_sixth_finish_reason(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(
            lambda r: [started(r), step(r, "a"), Finished(request_id=r.request_id, reason="cancelled")]
        )
    )
    events = events_of((await rig.post(chat(stream=True))).text)
    assert json.loads(events[-1])["error"]["code"] == "cancelled"
    assert_error(await rig.post(chat()), 500, "server_error", "cancelled")


async def test_bug_in_the_engine_client_is_a_500_that_tells_nothing(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: [ValueError("secret detail")]))
    reply = await rig.post(chat(), headers={"x-request-id": "abc"})
    text = assert_error(reply, 500, "server_error", "internal_error")
    assert "secret" not in text
    assert reply.headers["x-request-id"] == "abc"


async def test_exception_in_a_handler_is_a_500_in_the_same_shape(rig: ServerRig) -> None:
    async def broken() -> None:
        await asyncio.sleep(0)
        raise KeyError("secret detail")

    rig.app.add_api_route("/broken", broken)
    reply = await rig.http.get("/broken")
    text = assert_error(reply, 500, "server_error", "internal_error")
    assert "secret" not in text
