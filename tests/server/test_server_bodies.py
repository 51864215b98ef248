"""How large bodies may be, how many are read at a time, and how slowly."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import msgspec
import pytest
from fake_engine import MODEL, FakeEngine, until
from server_rig import CHAT, ServerRig, StartServer, chat
from test_server_embeddings import EMBEDDER, embed

from s2moe.server.body_gate import LEAST_LIMIT_BYTES, OTHER_FIELDS_BYTES, BodyGate, BodyLimit
from s2moe.server.middleware import BodyReading

MIB = 2**20


@pytest.mark.parametrize(
    ("n_ctx", "piece", "max_bytes", "limit"),
    [
        (8192, 0, 8 * MIB, 8 * MIB),
        (512, 16, 8 * MIB, LEAST_LIMIT_BYTES),
        (8192, 16, 8 * MIB, 6 * 8192 * 16 + OTHER_FIELDS_BYTES),
        (131072, 128, 8 * MIB, 8 * MIB),
        (512, 16, 2048, 2048),
    ],
)
def test_limit_follows_from_the_context(n_ctx: int, piece: int, max_bytes: int, limit: int) -> None:
    model = msgspec.structs.replace(MODEL, n_ctx=n_ctx, longest_piece_bytes=piece)
    assert BodyLimit(max_bytes).of_model(model) == limit
    assert BodyLimit(max_bytes).of_model(None) == max_bytes
    embedder = msgspec.structs.replace(model, gives_embeddings=True)
    assert BodyLimit(max_bytes).of_model(embedder) == max_bytes


def small_context() -> FakeEngine:
    engine = FakeEngine()
    engine.model = msgspec.structs.replace(MODEL, n_ctx=512, longest_piece_bytes=16)
    return engine


async def test_refusal_names_the_limit_and_the_context(start_server: StartServer) -> None:
    rig = await start_server(small_context())
    reply = await rig.post(chat("x" * LEAST_LIMIT_BYTES))
    assert reply.status_code == 413
    message = reply.json()["error"]["message"]
    assert str(LEAST_LIMIT_BYTES) in message
    assert "context of 512 tokens" in message
    assert (await rig.post(chat("x" * (512 * 16 - 1)))).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_that_cannot_fit_the_context_do_not_reach_the_queue(
    start_server: StartServer, stream: bool
) -> None:
    rig = await start_server(small_context())
    reply = await rig.post(chat("\N{EURO SIGN}" * 2731, stream=stream))  # of three bytes
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "maximum context length is 512 tokens" in error["message"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (512, 512)
    assert rig.engine.requests == []
    assert await rig.sample("s2moe_request_failures_total", reason="context_length") == 1
    assert (await rig.post(chat("\N{EURO SIGN}" * 2730))).status_code == 200


async def test_many_texts_of_an_embedding_model_are_not_one_prompt(start_server: StartServer) -> None:
    model = msgspec.structs.replace(EMBEDDER, n_ctx=512, longest_piece_bytes=16)
    rig = await start_server(FakeEngine(model=model, answer=embed))
    reply = await rig.http.post("/v1/embeddings", json={"input": ["x" * 1000] * 1000})
    assert reply.status_code == 200
    assert len(reply.json()["data"]) == 1000
    reply = await rig.http.post("/v1/embeddings", json={"input": ["x" * 1000] * 9000})
    assert reply.status_code == 413
    assert "--max-body-size" in reply.json()["error"]["message"]


async def test_refusal_without_a_length(start_server: StartServer) -> None:
    rig = await start_server(small_context())

    async def pieces():  # type: ignore[no-untyped-def]
        for _ in range(9):
            yield b" " * 32768

    assert (await rig.post(content=pieces())).status_code == 413


@dataclass
class Sender:
    """A body that is sent piece by piece."""

    rig: ServerRig
    text: str
    chunked: bool = False
    body: bytes = b""
    n_sent: int = field(default=0, init=False)

    async def open(self) -> None:
        self.body = json.dumps(chat(self.text)).encode()
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.rig.port)
        length = "Transfer-Encoding: chunked" if self.chunked else f"Content-Length: {len(self.body)}"
        self.writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())

    async def send(self, n_bytes: int) -> None:
        piece = self.body[self.n_sent : self.n_sent + n_bytes]
        self.n_sent += n_bytes
        is_last = self.n_sent >= len(self.body)
        if self.chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece) + b"0\r\n\r\n" * is_last
        self.writer.write(piece)
        await self.writer.drain()

    async def status(self) -> int:
        async with asyncio.timeout(5):
            return int((await self.reader.readline()).split()[1])


async def drip(sender: Sender) -> None:
    while True:
        await asyncio.sleep(0.05)
        await sender.send(1)


async def large_and_slow(rig: ServerRig) -> Sender:
    """A body that takes most of 1 MiB, of which a part has been read."""
    sender = Sender(rig, "x" * 700_000)
    await sender.open()
    await sender.send(200_000)
    await asyncio.sleep(0.05)
    return sender


async def test_large_body_waits_for_another_but_small_ones_do_not(start_server: StartServer) -> None:
    rig = await start_server(max_body_size=MIB)
    first, second = await large_and_slow(rig), Sender(rig, "y" * 700_000)
    await second.open()
    sending = asyncio.create_task(second.send(len(second.body) + 1000))
    assert (await rig.post(chat())).status_code == 200
    await asyncio.sleep(0.1)
    assert len(rig.engine.requests) == 1
    await first.send(600_000)
    assert await first.status() == 200
    assert await second.status() == 200
    await sending
    assert len(rig.engine.requests) == 3


async def test_body_of_unknown_length_does_not_keep_others_from_theirs(start_server: StartServer) -> None:
    rig = await start_server(max_body_size=MIB)
    slow = Sender(rig, "x" * 200_000, chunked=True)
    await slow.open()
    await slow.send(150_000)
    await asyncio.sleep(0.05)
    for chunked in (False, True):
        quick = Sender(rig, "y" * 700_000, chunked=chunked)
        await quick.open()
        sending = asyncio.create_task(quick.send(len(quick.body)))
        assert await quick.status() == 200
        await sending
    await slow.send(100_000)
    assert await slow.status() == 200


async def test_long_bodies_of_unknown_length_take_turns(start_server: StartServer) -> None:
    rig = await start_server(max_body_size=MIB)
    senders = [Sender(rig, str(n) * 700_000, chunked=True) for n in range(6)]

    async def send(sender: Sender) -> int:
        await sender.open()
        for _ in range(8):
            await sender.send(100_000)
        return await sender.status()

    assert await asyncio.gather(*(send(sender) for sender in senders)) == [200] * 6
    assert (await rig.post(chat("y" * 700_000))).status_code == 200


async def test_bodies_of_unknown_length_wait_where_four_wait_for_one_that_is_slow(
    start_server: StartServer,
) -> None:
    rig = await start_server(max_body_size=MIB)
    slow = await large_and_slow(rig)
    waiting = [Sender(rig, str(n) * 400_000, chunked=True) for n in range(4)]
    waiting.append(Sender(rig, "4" * 200_000, chunked=True))
    sending = []
    for sender in waiting:
        await sender.open()
        sending.append(asyncio.create_task(sender.send(len(sender.body))))
        await asyncio.sleep(0.05)
    assert (await rig.post(chat())).status_code == 200
    short = Sender(rig, "z" * 30_000, chunked=True)
    await short.open()
    await short.send(len(short.body))
    assert await short.status() == 200
    assert len(rig.engine.requests) == 2  # the four and the fifth wait
    await slow.send(600_000)
    assert [await sender.status() for sender in (slow, *waiting)] == [200] * 6
    await asyncio.gather(*sending)
    assert len(rig.engine.requests) == 8


async def test_body_whose_turn_does_not_come_is_429(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BodyReading, "turn_patience_seconds", 0.3)
    rig = await start_server(max_body_size=MIB)
    first, second = await large_and_slow(rig), Sender(rig, "y" * 700_000)
    await second.open()
    await second.send(1000)
    dripping = asyncio.create_task(drip(first))
    async with asyncio.timeout(5):
        reply = (await second.reader.read()).decode()
    dripping.cancel()
    head, _, body = reply.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 429")
    assert int(head.lower().partition("retry-after: ")[2].split()[0]) >= 1
    assert json.loads(body)["error"]["code"] == "queue_timeout"
    await first.send(700_000)
    assert await first.status() == 200
    assert (await rig.post(chat("z" * 700_000))).status_code == 200


async def test_client_that_leaves_makes_room(start_server: StartServer) -> None:
    rig = await start_server(max_body_size=MIB)
    first = await large_and_slow(rig)
    first.writer.transport.abort()
    assert (await asyncio.wait_for(rig.post(chat("y" * 700_000)), 5)).status_code == 200


@pytest.mark.parametrize("dribble", [False, True])
async def test_body_that_comes_too_slowly_is_408_and_makes_room(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, dribble: bool
) -> None:
    monkeypatch.setattr(BodyReading, "patience_seconds", 0.3)
    rig = await start_server(max_body_size=MIB)
    slow = Sender(rig, "x" * 700_000)
    await slow.open()
    await slow.send(1000)

    dripping = asyncio.create_task(drip(slow) if dribble else asyncio.sleep(0))
    waiting = asyncio.create_task(rig.post(chat("y" * 700_000)))
    assert await slow.status() == 408
    assert (await waiting).status_code == 200
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)


async def test_gate_is_first_come_first_served_and_survives_cancellation() -> None:
    gate = BodyGate()
    order: list[int] = []

    async def pass_through(n_bytes: int) -> None:
        await gate.enter(n_bytes, 100)
        order.append(n_bytes)

    await gate.enter(80, 100)
    tasks = [asyncio.create_task(pass_through(n)) for n in (500, 30, 20)]
    await asyncio.sleep(0)
    assert order == []  # 20 would fit, but is not the first
    tasks[0].cancel()
    await until(lambda: tasks[0].done())
    gate.leave(80)
    await asyncio.gather(*tasks[1:])
    assert order == [30, 20]
    gate.leave(30)
    gate.leave(20)
    await asyncio.wait_for(gate.enter(1000, 100), 1)
    waiter = asyncio.create_task(pass_through(7))
    await asyncio.sleep(0)
    gate.leave(1000)
    waiter.cancel()  # in the very turn in which it is let in
    await asyncio.gather(waiter, return_exceptions=True)
    await asyncio.wait_for(gate.enter(1000, 100), 1)
