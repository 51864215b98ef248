"""What comes before a request: heads without end, what is no HTTP, and connections without number."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_engine import FakeEngine, endless, until
from server_rig import ServerRig, StartServer, chat
from starlette.types import Receive, Scope, Send

from s2moe.server import connection
from s2moe.server.body_gate import UNGATED_BYTES
from s2moe.server.connection import MOST_HEAD_BYTES, MOST_HEADERS, MOST_PIPELINED, OTHER_CONNECTIONS
from s2moe.server.serve import make_server
from s2moe.server.settings import Settings

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
TEXT = json.dumps({"content": "hi"}).encode()


class Client:
    """A socket, and what came from its other end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of the next answer."""
        async with asyncio.timeout(5):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split(" ")[1]), headers, json.loads(body)

    async def refusal(self, status: int, code: str) -> str:
        """The message of an error after which the server closes the connection."""
        found, headers, body = await self.answer()
        error = body["error"]
        assert (found, error["code"], error["param"]) == (status, code, None)
        assert headers["content-type"] == "application/json"
        assert headers["connection"] == "close"
        assert headers["x-request-id"]
        assert await self.rest() == b""
        return str(error["message"])

    async def rest(self) -> bytes:
        """Up to the end of the connection."""
        async with asyncio.timeout(5):
            return await self.reader.read()


@asynccontextmanager
async def connected(rig: ServerRig) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


def head_of(n_bytes: int, begin: bytes = GET) -> bytes:
    """So large a head, of one long header besides what it begins with."""
    rest = n_bytes - len(begin) - len(b"A: \r\n\r\n")
    return begin + b"A: " + b"a" * rest + b"\r\n\r\n"


@pytest.mark.parametrize("n_bytes", [30 * 1024, MOST_HEAD_BYTES])
async def test_long_head_within_the_limit_passes(rig: ServerRig, n_bytes: int) -> None:
    async with connected(rig) as client:
        await client.send(head_of(n_bytes))
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        head_of(MOST_HEAD_BYTES + 1),
        head_of(1024 * 1024),
        b"GET /health?" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET " + b"a" * 200_000,
        GET + b"a: b\r\n" * 20_000 + b"\r\n",
        GET + b"a: b\r\n" * MOST_HEADERS + b"\r\n",
        GET + b"a" * 200_000,
        b"\r\n" * 50_000,
    ],
    ids=[
        "by one",
        "long header",
        "long query",
        "long path",
        "many headers",
        "by one header",
        "long name",
        "empty lines",
    ],
)
async def test_head_without_end_is_431(start_server: StartServer, head: bytes) -> None:
    rig = await start_server(api_key="secret")
    async with connected(rig) as client:
        await client.send(head)
        message = await client.refusal(431, "headers_too_large")
        assert str(MOST_HEAD_BYTES) in message
    assert (await rig.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"2;" + b"a" * 200_000,
        b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 20_000,
        b"2\r\n{}\r\n0\r\na: " + b"b" * 200_000,
    ],
    ids=["chunk extension", "many trailers", "long trailer"],
)
async def test_so_is_what_comes_with_a_chunked_body(rig: ServerRig, body: bytes) -> None:
    async with connected(rig) as client:
        await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        await client.refusal(431, "headers_too_large")


async def test_as_many_headers_as_are_allowed_pass(rig: ServerRig) -> None:
    async with connected(rig) as client:
        await client.send(GET + b"a: b\r\n" * (MOST_HEADERS - 1) + b"\r\n")
        assert (await client.answer())[0] == 200


async def test_each_request_of_a_connection_has_the_whole_limit(rig: ServerRig) -> None:
    async with connected(rig) as client:
        for _ in range(3):
            await client.send(head_of(MOST_HEAD_BYTES - 1024))
            assert (await client.answer())[0] == 200
        await client.send(head_of(MOST_HEAD_BYTES + 1))
        await client.refusal(431, "headers_too_large")


async def test_pipelined_requests_have_the_whole_limit_each(rig: ServerRig) -> None:
    async with connected(rig) as client:
        await client.send(head_of(40 * 1024) * 5)
        assert [(await client.answer())[0] for _ in range(5)] == [200] * 5


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_does_not_count(rig: ServerRig, chunked: bool) -> None:
    body = json.dumps({"content": "a" * 300_000}).encode()
    async with connected(rig) as client:
        if chunked:
            pieces = (body[i : i + 7] for i in range(0, len(body), 7))
            sent = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
            await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + sent)
        else:
            await client.send(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        status, _, reply = await client.answer()
        assert (status, len(reply.get("tokens", []))) == (200, 300_000)
        await client.send(POST + b"Content-Length: %d\r\n\r\n%b" % (len(TEXT), TEXT))
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}zz\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"G?T /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["chunk size", "chunk end", "negative length", "two lengths", "method", "url", "version", "TLS"],
)
async def test_what_is_no_http_is_a_400_of_the_api(
    rig: ServerRig, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with connected(rig) as client:
            await client.send(data)
            await client.refusal(400, "invalid_http")
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    (record,) = [record for record in caplog.records if record.name == connection.__name__]
    assert record.fields["request_id"]  # type: ignore[attr-defined]


async def test_offer_of_another_protocol_is_passed_over(
    rig: ServerRig, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(rig) as client:
        for _ in range(2):
            await client.send(GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n")
            assert (await client.answer())[0] == 200
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_web_socket_is_refused(rig: ServerRig) -> None:
    offer = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    async with connected(rig) as client:
        await client.send(GET + offer + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 403")


async def test_anthropic_routes_have_errors_of_their_shape(rig: ServerRig) -> None:
    async with connected(rig) as client:
        await client.send(b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n")
        status, headers, body = await client.answer()
        assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
        assert body["request_id"] == headers["x-request-id"]


async def test_no_answer_is_written_into_another_one(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless))
    stream = await rig.connect(chat("x", stream=True))
    await stream.read_until(b'"content":"x"')
    stream._writer.write(b"what is no HTTP\r\n\r\n")
    assert b"HTTP/1.1" not in await stream.read_all()
    await rig.engine.until_aborted("x")


async def test_too_many_pipelined_requests_end_the_connection(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless))
    stream = await rig.connect(chat("x", stream=True))
    await stream.read_until(b'"content":"x"')
    stream._writer.write((GET + b"\r\n") * (MOST_PIPELINED + 1))
    assert b"HTTP/1.1" not in await stream.read_all()
    await rig.engine.until_aborted("x")  # the one that ran, and not only the newest


async def test_client_that_leaves_with_requests_in_the_pipeline_is_noticed(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless))
    stream = await rig.connect(chat("x", stream=True))
    stream._writer.write(GET + b"\r\n")
    await stream.read_until(b'"content":"x"')
    stream.leave()
    await rig.engine.until_aborted("x")


async def test_no_more_of_a_body_is_read_ahead_than_may_be() -> None:
    async def never_reads(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(60)

    rig = ServerRig(FakeEngine(), Settings())
    rig.server = make_server(never_reads)
    async with rig.running(), connected(rig) as client:
        client.writer.write(POST + b"Content-Length: 1000000\r\n\r\n" + b"a" * 1_000_000)
        await until(lambda: rig.server.server_state.connections != set())
        await asyncio.sleep(0.3)
        (ours,) = rig.server.server_state.connections
        assert UNGATED_BYTES <= len(ours.cycle.body) <= UNGATED_BYTES + 16 * 1024  # type: ignore[union-attr]
        for task in rig.server.server_state.tasks:
            task.cancel()


@asynccontextmanager
async def limited(engine: FakeEngine, most_connections: int) -> AsyncIterator[ServerRig]:
    rig = ServerRig(engine, Settings())
    rig.server = make_server(rig.app, most_connections=most_connections)
    async with rig.running():
        yield rig


async def test_connections_beyond_the_limit_are_503() -> None:
    async with limited(FakeEngine(endless), 3) as rig:
        stream = await rig.connect(chat("x", stream=True))
        await stream.read_until(b'"content":"x"')
        async with connected(rig) as idle, connected(rig) as other:
            await until(lambda: len(rig.server.server_state.connections) == 3)
            for _ in range(3):
                async with connected(rig) as refused:
                    await refused.send(GET + b"\r\n")
                    status, headers, body = await refused.answer()
                    assert (status, body["error"]["code"]) == (503, "too_many_connections")
                    assert int(headers["retry-after"]) >= 1
                    assert headers["connection"] == "close"
            await idle.send(GET + b"\r\n")
            assert (await idle.answer())[0] == 200
            other.writer.close()
            await until(lambda: len(rig.server.server_state.connections) == 2)
            async with connected(rig) as new:
                await new.send(GET + b"\r\n")
                assert (await new.answer())[0] == 200
        stream.leave()


def test_streams_fit_beside_the_queue() -> None:
    assert OTHER_CONNECTIONS >= 2 * 64


@pytest.mark.parametrize("begin", [b"", b"GET / HT", b"\r\n", GET])
async def test_connection_on_which_no_request_comes_is_closed(
    rig: ServerRig, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.3)
    began = time.monotonic()
    async with connected(rig) as client:
        await client.send(begin)
        assert await client.rest() == b""
    assert 0.2 < time.monotonic() - began < 3
    async with connected(rig) as client:  # after an answer, too
        await client.send(GET + b"\r\n")
        assert (await client.answer())[0] == 200
        if begin:
            await client.send(begin)
            assert await client.rest() == b""


async def test_running_request_is_not_closed_for_want_of_another(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.1)
    rig = await start_server(FakeEngine(endless))
    stream = await rig.connect(chat("x", stream=True))
    await stream.read_until(b'"content":"x"')
    await asyncio.sleep(0.4)
    assert rig.engine.running == "x"
    stream.leave()
