"""/tokenize, /detokenize, /apply-template and /v1/chat/completions/input_tokens."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import MODEL, FakeEngine, byte_tokens, endless, until
from server_rig import ServerRig, StartServer, chat
from test_server_errors import assert_error, assert_invalid

from s2moe.engine.messages import (
    ApplyTemplate,
    Detokenize,
    Query,
    QueryFailed,
    QueryReply,
    Rendered,
    Tokenize,
)
from s2moe.server.engine_client import EngineDiedError, EngineState

COUNT = "/v1/chat/completions/input_tokens"
CALLS = [
    ("/tokenize", {"content": "hi"}),
    ("/detokenize", {"tokens": [104]}),
    ("/apply-template", chat("hi")),
    (COUNT, chat("hi")),
]


async def ask(rig: ServerRig, path: str, **body: Any) -> httpx.Response:
    return await rig.http.post(path, json=body)


async def test_tokens_of_a_text(rig: ServerRig) -> None:
    reply = await ask(rig, "/tokenize", content="añ")
    assert (reply.status_code, reply.json()) == (200, {"tokens": [97, 195, 177]})
    (query,) = rig.engine.queries
    assert isinstance(query, Tokenize)
    assert (query.text, query.add_special, query.parse_special) == ("añ", False, True)


async def test_pieces_are_text_or_bytes(rig: ServerRig) -> None:
    reply = await ask(rig, "/tokenize", content="añ", with_pieces=True)
    assert reply.json()["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 195, "piece": [195]},
        {"id": 177, "piece": [177]},
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"add_special": True, "parse_special": False}, (True, False)),
        ({"add_special": False, "parse_special": True}, (False, True)),
        ({"add_special": None, "parse_special": None, "with_pieces": None}, (False, True)),
    ],
)
async def test_options_of_tokenize_reach_the_engine(
    rig: ServerRig, fields: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    assert (await ask(rig, "/tokenize", content="", **fields)).json() == {"tokens": []}
    (query,) = rig.engine.queries
    assert isinstance(query, Tokenize)
    assert (query.add_special, query.parse_special) == expected


async def test_text_of_tokens(rig: ServerRig) -> None:
    assert (await ask(rig, "/detokenize", tokens=[72, 105])).json() == {"content": "Hi"}
    # half a character
    assert (await ask(rig, "/detokenize", tokens=[195])).json() == {"content": "\ufffd"}
    assert (await ask(rig, "/detokenize", tokens=[])).json() == {"content": ""}
    assert isinstance(rig.engine.queries[0], Detokenize)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def test_template_gives_the_prompt_and_its_length(rig: ServerRig) -> None:
    body = chat("hi", tools=[TOOL], chat_template_kwargs={"enable_thinking": False}, model="m")
    prompt = "user: hi\n"
    assert (await ask(rig, "/apply-template", **body)).json() == {"prompt": prompt}
    assert (await ask(rig, COUNT, **body)).json() == {
        "object": "response.input_tokens",
        "input_tokens": len(prompt),
    }
    for query in rig.engine.queries:
        assert isinstance(query, ApplyTemplate)
        assert json.loads(query.messages_json) == [{"role": "user", "content": "hi"}]
        options = json.loads(query.chat_options_json)
        assert options["tools"][0]["function"]["name"] == "look"
        assert options["chat_template_kwargs"] == {"enable_thinking": False}
    assert rig.engine.requests == []


async def test_each_route_has_a_twin_with_or_without_v1(rig: ServerRig) -> None:
    for path, body in CALLS:
        twin = path.removeprefix("/v1") if path.startswith("/v1") else f"/v1{path}"
        replies = [await ask(rig, each, **body) for each in (path, twin)]
        assert replies[0].status_code == 200
        assert replies[0].json() == replies[1].json()


async def test_questions_are_answered_while_a_generation_runs(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless))
    running = await rig.connect(chat("long", stream=True))
    await rig.engine.until_running("long")
    for path, body in CALLS:
        assert (await ask(rig, path, **body)).status_code == 200
    assert rig.engine.running == "long"
    running.leave()


# what is refused


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {"content": None}, "content"),
        ("/tokenize", {"content": ["a"]}, "content"),
        ("/tokenize", {"content": "a", "add_special": 1}, "add_special"),
        ("/tokenize", {"content": "a", "with_pieces": "yes"}, "with_pieces"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": [0, MODEL.n_vocab]}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
        (COUNT, {"messages": [{"role": "user"}]}, "messages[0]"),
    ],
)
async def test_wrong_field_is_named(rig: ServerRig, path: str, fields: dict[str, Any], param: str) -> None:
    assert_invalid(await ask(rig, path, **fields), "invalid_value", param)
    assert rig.engine.queries == []


@pytest.mark.parametrize(
    ("path", "param"), [("/tokenize", "content"), ("/detokenize", "tokens"), (COUNT, "messages")]
)
async def test_missing_field_is_named(rig: ServerRig, path: str, param: str) -> None:
    assert_invalid(await ask(rig, path, other=1), "missing_required_parameter", param)


async def test_what_the_engine_refuses_is_the_clients_error(start_server: StartServer) -> None:
    def refuse(query: Query) -> QueryReply:
        return QueryFailed(
            query_id=query.query_id, code="template_error", message="roles must alternate", param="messages"
        )

    rig = await start_server(FakeEngine(answer=refuse))
    for path in ("/apply-template", COUNT):
        text = assert_invalid(await ask(rig, path, **chat()), "template_error", "messages")
        assert "roles must alternate" in text


@pytest.mark.parametrize(
    ("code", "status", "kind", "shown"),
    [
        ("queue_full", 429, "rate_limit_error", "queue_full"),
        ("loading", 503, "unavailable_error", "loading"),
        ("insufficient_memory", 503, "server_error", "insufficient_memory"),
        ("internal", 500, "server_error", "internal_error"),
        ("cancelled", 500, "server_error", "cancelled"),
    ],
)
async def test_what_is_not_the_clients_error_is_not_a_400(
    start_server: StartServer, code: str, status: int, kind: str, shown: str
) -> None:
    rig = await start_server(
        FakeEngine(answer=lambda query: QueryFailed(query_id=query.query_id, code=code, message="why"))
    )
    reply = await ask(rig, "/tokenize", content="a")
    assert_error(reply, status, kind, shown)
    assert ("retry-after" in reply.headers) == (code in ("queue_full", "loading"))


async def test_context_overflow_says_both_numbers(start_server: StartServer) -> None:
    def overflow(query: Query) -> QueryReply:
        return QueryFailed(
            query_id=query.query_id,
            code="context_length_exceeded",
            message="too long",
            n_prompt_tokens=9000,
            n_ctx=4096,
        )

    rig = await start_server(FakeEngine(answer=overflow))
    reply = await ask(rig, COUNT, **chat())
    assert "maximum context length is 4096" in assert_invalid(reply, "context_length_exceeded")
    assert (reply.json()["error"]["n_prompt_tokens"], reply.json()["error"]["n_ctx"]) == (9000, 4096)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (EngineState.LOADING, "loading"),
        (EngineState.DEAD, "engine_dead"),
    ],
)
async def test_without_an_engine_it_is_503(start_server: StartServer, state: EngineState, code: str) -> None:
    model = None if state is EngineState.LOADING else MODEL
    rig = await start_server(FakeEngine(state=state, model=model))
    for path, body in CALLS:
        reply = await ask(rig, path, **body)
        assert_error(reply, 503, "unavailable_error", code)
        assert int(reply.headers["retry-after"]) >= 1
    assert await rig.sample("s2moe_requests_rejected_total", reason=code) == len(CALLS)


async def test_question_waits_while_the_engine_restarts(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.RESTARTING))
    waiting = [asyncio.create_task(ask(rig, path, **body)) for path, body in CALLS]
    await asyncio.sleep(0.2)
    assert not any(each.done() for each in waiting)
    rig.engine.set_state(EngineState.READY)
    assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [200] * len(CALLS)


async def test_question_waits_for_a_restart_no_longer_than_a_request(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.RESTARTING), queue_timeout=0.2)
    began = time.monotonic()
    replies = await asyncio.gather(*(ask(rig, "/tokenize", content="a") for _ in range(5)))
    assert time.monotonic() - began < 0.8  # together, not one after the other
    for reply in replies:
        assert_error(reply, 429, "rate_limit_error", "queue_timeout")
    rig.engine.set_state(EngineState.READY)
    assert (await ask(rig, "/tokenize", content="a")).status_code == 200


async def test_question_that_waits_for_an_engine_which_is_given_up_is_503(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.RESTARTING))
    waiting = asyncio.create_task(ask(rig, "/tokenize", content="a"))
    await asyncio.sleep(0.1)
    rig.engine.set_state(EngineState.DEAD)
    assert_error(await waiting, 503, "unavailable_error", "engine_dead")


async def test_question_that_waits_for_the_restart_ends_with_the_server(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.RESTARTING))
    waiting = asyncio.create_task(ask(rig, "/tokenize", content="a"))
    await asyncio.sleep(0.1)
    rig.admission.drain()
    assert_error(await waiting, 503, "unavailable_error", "draining")


async def test_while_draining_it_is_503(rig: ServerRig) -> None:
    rig.admission.drain()
    for path, body in CALLS:
        assert_error(await ask(rig, path, **body), 503, "unavailable_error", "draining")
    assert rig.engine.queries == []


async def test_engine_that_dies_over_a_question_is_500(start_server: StartServer) -> None:
    def die(query: Query) -> QueryReply:
        raise EngineDiedError("gone", generation_began=False)

    rig = await start_server(FakeEngine(answer=die))
    reply = await ask(rig, "/tokenize", content="a")
    assert_error(reply, 500, "server_error", "engine_died")
    assert "x-should-retry" not in reply.headers


async def test_reply_of_another_kind_is_an_engine_error(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(answer=lambda query: Rendered(query_id=query.query_id, prompt="", n_tokens=0))
    )
    assert_error(await ask(rig, "/tokenize", content="a"), 500, "server_error", "engine_error")


class SlowEngine(FakeEngine):
    """Answers no question before `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.n_asked = 0
        self.n_dropped = 0

    async def ask(self, query: Query) -> QueryReply:
        self.n_asked += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.n_dropped += 1
            raise
        return byte_tokens(query)


async def test_so_many_questions_may_wait(start_server: StartServer) -> None:
    engine = SlowEngine()
    rig = await start_server(engine, queue_size=2)
    waiting = [asyncio.create_task(ask(rig, "/tokenize", content="a")) for _ in range(4)]
    await until(lambda: any(task.done() for task in waiting))
    (refused,) = [task for task in waiting if task.done()]
    assert_error(refused.result(), 429, "rate_limit_error", "queue_full")
    assert int(refused.result().headers["retry-after"]) >= 1
    assert await rig.sample("s2moe_requests_rejected_total", reason="queue_full") == 1
    assert engine.n_asked == 1
    engine.go_on.set()
    statuses = [reply.status_code for reply in await asyncio.gather(*waiting)]
    assert sorted(statuses) == [200, 200, 200, 429]
    assert (await ask(rig, "/detokenize", tokens=[1])).status_code == 200


async def test_client_that_leaves_takes_its_question_back(start_server: StartServer) -> None:
    engine = SlowEngine()
    rig = await start_server(engine, queue_size=0)
    with pytest.raises(httpx.ReadTimeout):
        await rig.http.post("/tokenize", json={"content": "a"}, timeout=0.2)
    await until(lambda: engine.n_dropped == 1)
    engine.go_on.set()
    assert (await ask(rig, "/tokenize", content="a")).status_code == 200


async def test_question_whose_client_leaves_before_its_turn_never_reaches_the_engine(
    start_server: StartServer,
) -> None:
    engine = SlowEngine()
    rig = await start_server(engine)
    first = asyncio.create_task(ask(rig, "/tokenize", content="a"))
    await until(lambda: engine.n_asked == 1)
    with pytest.raises(httpx.ReadTimeout):
        await rig.http.post("/tokenize", json={"content": "b"}, timeout=0.2)
    last = asyncio.create_task(ask(rig, "/tokenize", content="c"))
    await asyncio.sleep(0.2)
    assert engine.n_asked == 1
    engine.go_on.set()
    assert [reply.status_code for reply in await asyncio.gather(first, last)] == [200, 200]
    assert (engine.n_asked, engine.n_dropped) == (2, 0)


async def test_question_that_takes_too_long_is_given_up(start_server: StartServer) -> None:
    engine = SlowEngine()
    rig = await start_server(engine, request_timeout=0.1)
    reply = await ask(rig, "/tokenize", content="a")
    assert_error(reply, 504, "server_error", "timeout")
    assert engine.n_dropped == 1


async def test_huge_replies_are_whole(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(model=msgspec.structs.replace(MODEL, n_ctx=10)))
    tokens = (await ask(rig, "/tokenize", content="a" * 100_000)).json()["tokens"]
    assert tokens == [97] * 100_000
    text = (await ask(rig, "/detokenize", tokens=tokens)).json()["content"]
    assert text == "a" * 100_000
