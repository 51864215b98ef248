"""How fast the front end is when the engine costs nothing.

    .venv/bin/python -m s2moe.bench.front_end_speed [--tokens 20000] [--rounds 5] [--profile FILE]

The real front end on one core; on another one an engine process that only emits (`burst_engine`) and a
client. One SSE event per token. Three numbers:

    events/s   one stream of 20,000 tokens that the engine emits at once, first byte to last at the client
    ms/event   tokens 2 ms apart: from when the engine had a token until the client has read its event, median
    idle       CPU time of the front end over 10 s with 64 open, silent streams, less the same without any

Exits with 1 when a target was missed. Needs an idle machine of two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from sse_starlette.sse import AppStatus

from s2moe.engine.messages import Configure
from s2moe.server.admission import Admission
from s2moe.server.app import create_app
from s2moe.server.metrics import Metrics
from s2moe.server.serve import make_server, open_socket
from s2moe.server.settings import load_settings
from s2moe.server.supervisor import EngineSupervisor

EVENTS_PER_SECOND: Final = 10_000.0
EVENT_MS: Final = 0.3
IDLE_CPU_SHARE: Final = 0.005
"""Of a core: what the heartbeats of an idle server vary by."""
N_IDLE_STREAMS: Final = 64
IDLE_SECONDS: Final = 10.0
PACED = "paced 1000 0.002"


def choose_cpus() -> tuple[int | None, int | None]:
    """Cores for the front end and for the rest; None where there is no choice."""
    cpus = sorted(os.sched_getaffinity(0))
    return (cpus[0], cpus[-1]) if len(cpus) > 1 else (None, None)


@asynccontextmanager
async def front_end(engine_cpu: int | None) -> AsyncIterator[int]:
    """The whole front end on the burst engine; gives its port."""
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    settings = load_settings({"port": 0, "queue_size": N_IDLE_STREAMS})
    metrics = Metrics(model=settings.model_alias, queue_capacity=settings.queue_size)
    command = [sys.executable, "-m", "s2moe.bench.burst_engine"]
    if engine_cpu is not None:
        command += ["--cpu", str(engine_cpu)]
    supervisor = EngineSupervisor(Configure(model_path="none"), metrics, command=command)
    admission = Admission(supervisor, metrics, capacity=settings.queue_size)
    server = make_server(create_app(settings, supervisor, metrics, admission))
    listener = open_socket(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await supervisor.start()
    await supervisor.wait_ready()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        await supervisor.stop(5.0)


class Client:
    """Runs stream_client."""

    def __init__(self, port: int, cpu: int | None) -> None:
        self._command = [sys.executable, "-m", "s2moe.bench.stream_client"]
        if cpu is not None:
            self._command += ["--cpu", str(cpu)]
        self._port = str(port)

    async def read(self, text: str) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *self._command, self._port, text, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise SystemExit("the client failed; its message is above")
        report: dict[str, Any] = json.loads(output)
        return report

    @asynccontextmanager
    async def holding(self, n: int) -> AsyncIterator[None]:
        """`n` open streams that nothing is sent on."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command, "--hold", str(n), self._port, "idle", stdin=pipe, stdout=pipe
        )
        assert process.stdin is not None
        assert process.stdout is not None
        if await process.stdout.readline() != b"open\n":
            raise SystemExit("the client failed; its message is above")
        try:
            yield
        finally:
            process.stdin.close()
            await process.wait()


async def burst_rates(client: Client, n_tokens: int, n_rounds: int) -> tuple[list[float], list[float]]:
    """Events per second of each round, and CPU seconds of the front end; a first round is a warm-up."""
    rates, cpu_seconds = [], []
    for round_ in range(n_rounds + 1):
        began = time.process_time()
        report = await client.read(f"burst {n_tokens}")
        if report["n_events"] != n_tokens:
            raise SystemExit(f"{report['n_events']} events came of {n_tokens}")
        if round_ > 0:
            rates.append(n_tokens / report["seconds"])
            cpu_seconds.append(time.process_time() - began)
    return rates, cpu_seconds


async def idle_cpu_seconds(seconds: float) -> float:
    """CPU time that the front end takes in so many seconds of nothing."""
    began = time.process_time()
    await asyncio.sleep(seconds)
    return time.process_time() - began


async def measure(n_tokens: int, n_rounds: int) -> bool:
    """Prints the three numbers; returns whether they meet their targets."""
    own_cpu, other_cpu = choose_cpus()
    if own_cpu is not None:
        os.sched_setaffinity(0, {own_cpu})
    async with front_end(other_cpu) as port:
        client = Client(port, other_cpu)
        rates, cpu_seconds = await burst_rates(client, n_tokens, n_rounds)
        rate = statistics.median(rates)
        print(
            f"burst   {rate:8,.0f} events/s (median of {n_rounds}; {min(rates):,.0f} to {max(rates):,.0f}), "
            f"{statistics.median(cpu_seconds) / n_tokens * 1e6:.0f} µs of CPU per event; "
            f"target {EVENTS_PER_SECOND:,.0f}"
        )
        await client.read(PACED)
        latencies = sorted((await client.read(PACED))["latencies_ms"])
        p50, p90, p99 = (latencies[int(share * (len(latencies) - 1))] for share in (0.5, 0.9, 0.99))
        print(f"paced   {p50:.3f} ms per event, p90 {p90:.3f}, p99 {p99:.3f}; target {EVENT_MS:g}")
        without = await idle_cpu_seconds(IDLE_SECONDS)
        async with client.holding(N_IDLE_STREAMS):
            held = await idle_cpu_seconds(IDLE_SECONDS)
        share = (held - without) / IDLE_SECONDS
        print(
            f"idle    {held * 1e3:.0f} ms of CPU in {IDLE_SECONDS:g} s with {N_IDLE_STREAMS} streams, "
            f"{without * 1e3:.0f} ms without: {share:.2%} of a core; target {IDLE_CPU_SHARE:.1%}"
        )
    return rate >= EVENTS_PER_SECOND and p50 < EVENT_MS and share < IDLE_CPU_SHARE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="write cProfile's statistics there; slows the run down"
    )
    arguments = parser.parse_args()
    profile = cProfile.Profile() if arguments.profile else None
    with profile or contextlib.nullcontext():
        good = asyncio.run(measure(arguments.tokens, arguments.rounds))
    if profile is not None:
        profile.dump_stats(arguments.profile)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
