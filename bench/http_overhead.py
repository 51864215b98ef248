"""What the Python path costs per token.

The interval runs from the return of the native call that sampled a token to the moment its event has been
written to the client's socket.

    .venv/bin/python -m s2moe.bench.http_overhead [--model PATH] [--tokens 256] [--rounds 5]

Runs the real front end and the real engine process; the client is curl, one SSE event per token. Both ends of
the interval are read from CLOCK_MONOTONIC, which the two processes share. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from sse_starlette.sse import AppStatus
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from s2moe.engine.demo_model import ensure_demo_model
from s2moe.engine.messages import Configure, Generate, GenerationEvent, Step
from s2moe.server.admission import Admission
from s2moe.server.app import create_app
from s2moe.server.metrics import Metrics
from s2moe.server.serve import make_server, open_socket
from s2moe.server.settings import load_settings
from s2moe.server.supervisor import EngineSupervisor

PROMPT = "Tell me a long story about a river and the people who live beside it."


class RecordingSupervisor(EngineSupervisor):
    """Notes when each token was sampled."""

    sampled_ns: list[int]

    async def generate(self, request: Generate) -> AsyncGenerator[GenerationEvent]:
        self.sampled_ns = []
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                if isinstance(event, Step) and event.content:
                    self.sampled_ns.append(event.sampled_ns)
                yield event


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


async def measure(model: Path, n_tokens: int, n_rounds: int) -> list[float]:
    """Returns the overhead of every token in milliseconds; the first round is a warm-up."""
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    settings = load_settings({"port": 0})
    metrics = Metrics(model=settings.model_alias, queue_capacity=1)
    supervisor = RecordingSupervisor(Configure(model_path=str(model), n_ctx=2048), metrics)
    admission = Admission(supervisor, metrics, capacity=1)
    written_ns: list[int] = []
    server = make_server(create_app(settings, supervisor, metrics, admission))
    server.config.http = recording_protocol(written_ns)
    listener = open_socket(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await supervisor.start()
    await supervisor.wait_ready()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
    body = {
        "stream": True,
        "temperature": 0,
        "max_tokens": n_tokens,
        "messages": [{"role": "user", "content": PROMPT}],
    }
    overheads: list[float] = []
    for round_ in range(n_rounds + 1):
        written_ns.clear()
        curl = await asyncio.create_subprocess_exec(
            "curl", "-sN", url, "-H", "Content-Type: application/json", "-d", json.dumps(body),
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await curl.wait()
        # the role chunk is content too, and no token
        pairs = list(zip(supervisor.sampled_ns, written_ns[1:], strict=True))
        if round_ > 0:
            overheads += [(written - sampled) / 1e6 for sampled, written in pairs]
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
    overheads = sorted(asyncio.run(measure(model, arguments.tokens, arguments.rounds)))
    print(f"{len(overheads)} tokens; overhead per token in ms, sampled → written to the socket")
    for name, share in (("p50", 0.50), ("p90", 0.90), ("p99", 0.99)):
        print(f"  {name}  {overheads[int(share * (len(overheads) - 1))]:.3f}")
    print(f"  mean {statistics.fmean(overheads):.3f}")


if __name__ == "__main__":
    main()
