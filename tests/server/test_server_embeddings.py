"""/v1/embeddings: vectors in both encodings, and models that give none."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import openai
import pytest
from fake_engine import MODEL, FakeEngine, until
from server_rig import ServerRig, StartServer
from test_server_errors import assert_error, assert_invalid

from s2moe.engine.messages import Embed, Embedded, Query, QueryFailed, QueryReply
from s2moe.server.engine_client import EngineState

EMBEDDINGS = "/v1/embeddings"
EMBEDDER = msgspec.structs.replace(MODEL, name="Vectors", n_embd=2, gives_embeddings=True)
LABELS = {"model": "demo", "api": "embeddings", "stream": "false"}


def vector_of(given: str | Sequence[int]) -> list[float]:
    """Tells texts and tokens apart, and each from the others."""
    return [len(given) + 0.5, -1.0 if isinstance(given, str) else 1.0]


def embed(query: Query) -> QueryReply:
    assert isinstance(query, Embed)
    given = [*query.texts, *query.token_lists]
    return Embedded(
        query_id=query.query_id,
        vectors=[vector_of(each) for each in given],
        n_tokens=[len(each) for each in given],
    )


@pytest.fixture
async def rig(start_server: StartServer) -> ServerRig:
    return await start_server(FakeEngine(model=EMBEDDER, answer=embed))


async def ask(rig: ServerRig, **body: Any) -> httpx.Response:
    return await rig.http.post(EMBEDDINGS, json=body)


async def test_one_text_gives_one_vector(rig: ServerRig) -> None:
    reply = await ask(rig, input="four", model="any", user="ann")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [4.5, -1.0]}],
        "model": "demo",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert await rig.sample("s2moe_requests_total", **LABELS, finish="stop") == 1


@pytest.mark.parametrize(
    "given",
    [
        ["a", "bb"],
        [1, 2, 3],
        [[1, 2], [3]],
        ["a", [1, 2], "bbb", [3, 4, 5, 6]],
        [f"{index}" * (index % 7) for index in range(100)],
    ],
)
async def test_vectors_come_in_the_order_of_the_input(rig: ServerRig, given: list[Any]) -> None:
    inputs = [given] if isinstance(given[0], int) else given
    body = (await ask(rig, input=given)).json()
    assert [each["index"] for each in body["data"]] == list(range(len(inputs)))
    assert [each["embedding"] for each in body["data"]] == [vector_of(each) for each in inputs]
    assert body["usage"]["prompt_tokens"] == sum(len(each) for each in inputs)


async def test_many_inputs_are_several_questions(rig: ServerRig) -> None:
    await ask(rig, input=["a"] * 100)
    assert [len(query.texts) for query in rig.engine.queries if isinstance(query, Embed)] == [32, 32, 32, 4]


async def test_base64_holds_little_endian_floats(rig: ServerRig) -> None:
    body = (await ask(rig, input=["four"], encoding_format="base64")).json()
    data = base64.b64decode(body["data"][0]["embedding"])
    assert struct.unpack("<2f", data) == (4.5, -1.0)


async def test_openai_client_reads_vectors(rig: ServerRig) -> None:
    """It asks for base64 unless told otherwise."""
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
        for options in ({}, {"encoding_format": "float"}, {"dimensions": 2}):
            reply = await client.embeddings.create(model="any", input=["four", "a"], **options)  # type: ignore[arg-type]
            assert [each.embedding for each in reply.data] == [[4.5, -1.0], [1.5, -1.0]]
            assert reply.usage.total_tokens == 5


async def test_path_without_v1_answers_too(rig: ServerRig) -> None:
    assert (await rig.http.post("/embeddings", json={"input": "a"})).json()["object"] == "list"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": {"content": "a"}}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [MODEL.n_vocab]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 1}, "dimensions"),
        ({"dimensions": 3}, "dimensions"),
        ({"model": 5}, "model"),
    ],
)
async def test_wrong_field_is_named(rig: ServerRig, fields: dict[str, Any], param: str) -> None:
    assert param in assert_invalid(await ask(rig, **{"input": "a", **fields}), "invalid_value", param)
    assert rig.engine.queries == []


async def test_missing_input_is_named(rig: ServerRig) -> None:
    assert_invalid(await ask(rig, model="m"), "missing_required_parameter", "input")


async def test_model_that_gives_no_embeddings_says_so(start_server: StartServer) -> None:
    rig = await start_server()
    text = assert_invalid(await ask(rig, input="a"), "unsupported_model", "model")
    assert MODEL.name in text
    assert rig.engine.queries == []
    assert await rig.sample("s2moe_requests_total", **LABELS, finish="error") == 1


async def test_what_the_engine_refuses_is_the_clients_error(start_server: StartServer) -> None:
    def refuse(query: Query) -> QueryReply:
        return QueryFailed(
            query_id=query.query_id,
            code="context_length_exceeded",
            message="x",
            param="input",
            n_prompt_tokens=9000,
            n_ctx=512,
        )

    rig = await start_server(FakeEngine(model=EMBEDDER, answer=refuse))
    reply = await ask(rig, input="a")
    assert "maximum context length is 512" in assert_invalid(reply, "context_length_exceeded", "input")
    assert await rig.sample("s2moe_request_failures_total", reason="context_length") == 1


async def test_wrong_number_of_vectors_is_an_engine_error(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(
            model=EMBEDDER, answer=lambda query: Embedded(query_id=query.query_id, vectors=[], n_tokens=[])
        )
    )
    assert_error(await ask(rig, input="a"), 500, "server_error", "engine_error")


async def test_without_an_engine_it_is_503(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.LOADING, model=None))
    assert_error(await ask(rig, input="a"), 503, "unavailable_error", "loading")
    assert await rig.sample("s2moe_requests_rejected_total", reason="loading") == 1


async def test_other_model_is_404_only_when_the_server_is_strict(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(model=EMBEDDER, answer=embed), strict_model=True)
    reply = await ask(rig, input="a", model="text-embedding-3-small")
    assert_error(reply, 404, "not_found_error", "model_not_found", "model")


async def test_client_that_leaves_is_counted_and_asks_no_more(start_server: StartServer) -> None:
    class SlowEngine(FakeEngine):
        async def ask(self, query: Query) -> QueryReply:
            self.queries.append(query)
            await asyncio.Event().wait()
            raise AssertionError

    engine = SlowEngine(model=EMBEDDER)
    rig = await start_server(engine)
    with pytest.raises(httpx.ReadTimeout):
        await rig.http.post("/v1/embeddings", json={"input": ["a"] * 100}, timeout=0.2)
    labels = {"model": "demo", "api": "embeddings", "stream": "false", "finish": "cancelled"}
    for _ in range(100):
        if await rig.sample("s2moe_requests_total", **labels):
            break
        await asyncio.sleep(0.02)
    assert await rig.sample("s2moe_requests_total", **labels) == 1
    assert len(engine.queries) == 1


async def test_request_waits_while_the_engine_restarts(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(model=EMBEDDER, answer=embed, state=EngineState.RESTARTING))
    waiting = asyncio.create_task(ask(rig, input=["a"] * 40))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    rig.engine.set_state(EngineState.READY)
    assert len((await waiting).json()["data"]) == 40


async def test_so_many_requests_may_wait(start_server: StartServer) -> None:
    class SlowEngine(FakeEngine):
        async def ask(self, query: Query) -> QueryReply:
            await go_on.wait()
            return await super().ask(query)

    go_on = asyncio.Event()
    rig = await start_server(SlowEngine(model=EMBEDDER, answer=embed), queue_size=1)
    waiting = [asyncio.create_task(ask(rig, input="a")) for _ in range(3)]
    await until(lambda: any(task.done() for task in waiting))
    (refused,) = [task for task in waiting if task.done()]
    assert_error(refused.result(), 429, "rate_limit_error", "queue_full")
    assert await rig.sample("s2moe_requests_rejected_total", reason="queue_full") == 1
    go_on.set()
    replies = await asyncio.gather(*waiting)
    assert sorted(reply.status_code for reply in replies) == [200, 200, 429]
