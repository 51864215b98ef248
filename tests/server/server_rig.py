"""The real server, over real HTTP on an ephemeral port, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fake_engine import FakeEngine, until
from prometheus_client.parser import text_string_to_metric_families

from s2moe.server.admission import Admission
from s2moe.server.app import create_app
from s2moe.server.metrics import Metrics
from s2moe.server.serve import make_server
from s2moe.server.settings import Settings

CHAT = "/v1/chat/completions"


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


class ServerRig:
    def __init__(self, engine: FakeEngine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = Metrics(model=settings.model_alias, queue_capacity=settings.queue_size)
        engine.observer = self.metrics
        self.admission = Admission(
            engine, self.metrics, capacity=settings.queue_size, timeout_seconds=settings.queue_timeout
        )
        self.app = create_app(settings, engine, self.metrics, self.admission)
        self.server = make_server(self.app)
        self.port = 0
        self.http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ServerRig]:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        serving = asyncio.create_task(self.server.serve(sockets=[listener]))
        await until(lambda: self.server.started)
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=20, verify=False) as self.http:
                yield self
        finally:
            self.admission.cut()
            await self._end_at_once(serving)

    async def _end_at_once(self, serving: asyncio.Task[None]) -> None:
        """uvicorn's own shutdown polls for 0.3 s, which a hundred tests would feel."""
        for each in self.server.servers:
            each.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()
        serving.cancel()
        await asyncio.wait((serving, *self.server.server_state.tasks), timeout=5)

    async def post(self, body: dict[str, Any] | None = None, **arguments: Any) -> httpx.Response:
        if body is not None:
            arguments["json"] = body
        return await self.http.post(CHAT, **arguments)

    async def connect(self, body: dict[str, Any], path: str = CHAT) -> RawRequest:
        """Sends a request over a connection of its own, which the test may close at any moment."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        await writer.drain()
        return RawRequest(reader, writer)

    async def until_waiting(self, count: int) -> None:
        await until(lambda: self.admission.n_waiting == count)

    async def until_idle(self) -> None:
        async with asyncio.timeout(5):
            await self.admission.idle()

    async def sample(self, name: str, /, **labels: str) -> float:
        """One sample of /metrics. Raises LookupError when the series does not exist."""
        text = (await self.http.get("/metrics", headers=self.key_headers)).text
        for family in text_string_to_metric_families(text):
            for each in family.samples:
                if each.name == name and each.labels == labels:
                    return each.value
        raise LookupError(f"{name}{labels}")

    @property
    def key_headers(self) -> dict[str, str]:
        key = self.settings.api_key
        return {} if key is None else {"x-api-key": key.get_secret_value()}


class RawRequest:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read_until(self, text: bytes) -> bytes:
        async with asyncio.timeout(5):
            return await self._reader.readuntil(text)

    async def read_all(self) -> bytes:
        async with asyncio.timeout(10):
            return await self._reader.read()

    def leave(self) -> None:
        self._writer.transport.abort()


def events_of(text: str) -> list[str]:
    """The data of each event of an SSE body; comments are dropped."""
    blocks = [block for block in text.split("\n\n") if block]
    return [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The JSON events, without [DONE]."""
    return [json.loads(data) for data in events_of(text) if data != "[DONE]"]


StartServer = Callable[..., Awaitable[ServerRig]]
