"""What the Python path costs per token.

The interval runs from the return of the native call that sampled a token to the return of the call that
handed its event to the client's socket.

    .venv/bin/python -m s2moe.bench.http_overhead [--model PATH] [--tokens 256] [--rounds 5]

Runs the real front end and the real engine process, one SSE event per token, with two clients in turn: one
that sleeps until the answer is whole, and one that wakes up for each token. On a small machine the second
takes a core from the server at each token, inside the measured call; a client across a network does not. Both
ends of the interval are read from CLOCK_MONOTONIC, which the processes share. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from sse_starlette.sse import AppStatus
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from s2moe.engine.demo_model import ensure_demo_model
from s2moe.engine.messages import Configure, Generate, GenerationEvent, Speculation, Step
from s2moe.server.admission import Admission
from s2moe.server.app import create_app
from s2moe.server.engine_client import EventSink
from s2moe.server.metrics import Metrics
from s2moe.server.serve import make_server, open_socket
from s2moe.server.settings import load_settings
from s2moe.server.supervisor import EngineSupervisor

PROMPT = "Tell me a long story about a river and the people who live beside it."


CLIENT = """
import socket, sys
port, body, kind = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3]
connection = socket.socket()
if kind == "sleeps":
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 20)
connection.connect(("127.0.0.1", port))
head = "POST /v1/chat/completions HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
head += f"Content-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
connection.sendall(head.encode() + body)
while connection.recv(65536):
    pass
"""


class RecordingSupervisor(EngineSupervisor):
    """Notes when each token was sampled."""

    sampled_ns: list[int]

    async def run(self, request: Generate, sink: EventSink) -> None:
        self.sampled_ns = []

        def record(event: GenerationEvent) -> None:
            if isinstance(event, Step) and event.content:
                self.sampled_ns.append(event.sampled_ns)
            sink(event)

        await super().run(request, record)


class RecordingTransport:
    """Notes when the bytes of each content event have been handed to the socket."""

    def __init__(self, transport: asyncio.Transport, written_ns: list[int]) -> None:
        self._transport = transport
        self._written_ns = written_ns

    def write(self, data: bytes) -> None:
        self._transport.write(data)
        now = time.monotonic_ns()
        self._written_ns += [now] * data.count(b'"delta":{"content":')

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def recording_protocol(written_ns: list[int]) -> type[HttpToolsProtocol]:
    class Protocol(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(RecordingTransport(transport, written_ns))  # type: ignore[arg-type]

    return Protocol


async def measure(model: Path, n_tokens: int, n_rounds: int) -> dict[str, list[float]]:
    """Returns the overhead of every token in milliseconds, by client; the first round is a warm-up."""
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    settings = load_settings({"port": 0})
    metrics = Metrics(model=settings.model_alias, queue_capacity=1)
    # one token per step, each with a time of its own
    configure = Configure(model_path=str(model), n_ctx=2048, speculation=Speculation(method="off"))
    supervisor = RecordingSupervisor(configure, metrics)
    admission = Admission(supervisor, metrics, capacity=1)
    written_ns: list[int] = []
    server = make_server(create_app(settings, supervisor, metrics, admission))
    server.config.http = recording_protocol(written_ns)
    listener = open_socket(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await supervisor.start()
    await supervisor.wait_ready()
    port = listener.getsockname()[1]
    body = {
        "stream": True,
        "temperature": 0,
        "max_tokens": n_tokens,
        "messages": [{"role": "user", "content": PROMPT}],
    }
    overheads: dict[str, list[float]] = {"sleeps": [], "wakes": []}
    for round_ in range(n_rounds + 1):
        for client, values in overheads.items():
            written_ns.clear()
            command = (sys.executable, "-c", CLIENT, str(port), json.dumps(body), client)
            process = await asyncio.create_subprocess_exec(*command)
            await process.wait()
            pairs = zip(supervisor.sampled_ns, written_ns, strict=True)
            if round_ > 0:
                values += [(written - sampled) / 1e6 for sampled, written in pairs]
    server.should_exit = True
    await serving
    await supervisor.stop(5.0)
    return overheads


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF (default: the 16-expert demo model)")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = arguments.model or ensure_demo_model(progress=print)
    results = asyncio.run(measure(model, arguments.tokens, arguments.rounds))
    print("overhead per token in ms, sampled → written to the socket")
    print("  client    tokens    p50    p90    p99   mean")
    for client, values in results.items():
        values.sort()
        p50, p90, p99 = (values[int(share * (len(values) - 1))] for share in (0.50, 0.90, 0.99))
        mean = statistics.fmean(values)
        print(f"  {client:8s}  {len(values):6d}  {p50:.3f}  {p90:.3f}  {p99:.3f}  {mean:.3f}")


if __name__ == "__main__":
    main()
