"""What the two ways to more machines cost, measured on this one.

    .venv/bin/python deploy/scaling/measure.py gateway   # one server: through nginx, and straight
    .venv/bin/python deploy/scaling/measure.py replicas  # two users: two servers with half the cores each
    .venv/bin/python deploy/scaling/measure.py rpc       # layers with two workers, against one process

Ratios come from pairs of requests in turn, on servers that all run all the time: their geometric mean with
its 95 % interval, and of times the medians. Needs an idle machine, nginx, and for `rpc` rpc_build.py. On one
machine a network costs next to nothing, so these are lower bounds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import end_with_parent, free_ports, listens
from replicas import Replicas, ReplicasError
from rpc_serve import FOLDER as RPC_FOLDER
from rpc_serve import RpcError, check_build

from s2moe.bench.http_client import httpx
from s2moe.bench.speculation.ratios import Estimate, estimate
from s2moe.bench.workload import Messages, long_prompt
from s2moe.engine.demo_model import ensure_demo_model

N_TOKENS = 64
N_CTX = 1024
PLAIN = ("--speculation", "off", "--prompt-cache-size", "0", "--ctx-size", str(N_CTX))
START_SECONDS = 300


class MeasureError(Exception):
    """One line for the person at the terminal."""


@dataclass(frozen=True)
class Timing:
    """Of one streamed answer, in seconds from its request."""

    first: float
    last: float
    n_pieces: int

    @property
    def seconds_per_token(self) -> float:
        return (self.last - self.first) / (self.n_pieces - 1)


def stream(port: int, messages: Messages, n_tokens: int = N_TOKENS) -> Timing:
    """Raises MeasureError."""
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": n_tokens, "stream": True}
    started = time.monotonic()
    times = []
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    try:
        with httpx.stream("POST", url, json=body, timeout=600) as response:
            if response.status_code != httpx.codes.OK:
                raise MeasureError(f"port {port} answers {response.status_code}: {response.read()[:300]!r}")
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data.startswith("{") and (choices := json.loads(data).get("choices")):
                    times += [time.monotonic() - started] if choices[0]["delta"].get("content") else []
    except httpx.TransportError as error:
        raise MeasureError(f"port {port}: {error}") from error
    if len(times) < 2:
        raise MeasureError(f"port {port} answered with {len(times)} tokens")
    return Timing(times[0], times[-1], len(times))


def in_turn(
    n_pairs: int, one: Callable[[int], Timing], other: Callable[[int], Timing]
) -> list[tuple[Timing, Timing]]:
    """n_pairs of (one, other), which get their number; which comes first alternates. A pair before them is
    not counted."""
    pairs = []
    for i in range(-1, n_pairs):
        if i % 2 == 0:
            pairs.append((one(i), other(i)))
        else:
            second = other(i)
            pairs.append((one(i), second))
    return pairs[1:]


def ratio(pairs: Sequence[tuple[Timing, Timing]], of: Callable[[Timing], float]) -> Estimate:
    """of(one) / of(other)."""
    found = estimate([of(one) / of(other) for one, other in pairs])
    assert found is not None
    return found


def medians(pairs: Sequence[tuple[Timing, Timing]], of: Callable[[Timing], float]) -> tuple[float, float]:
    return statistics.median(of(one) for one, _ in pairs), statistics.median(of(other) for _, other in pairs)


def show(
    what: str, unit: str, scale: float, pairs: Sequence[tuple[Timing, Timing]], of: Callable[[Timing], float]
) -> None:
    one, other = (scale * value for value in medians(pairs, of))
    print(f"  {what}: {one:.2f} {unit}, against {other:.2f} {unit}: × {ratio(pairs, of):.3f}", flush=True)


@contextmanager
def replicas(n_servers: int, threads: int, model: Path) -> Iterator[Replicas]:
    """Servers behind nginx; their logs are dropped unless they fail."""
    with tempfile.TemporaryDirectory(prefix="s2moe-measure-") as folder:
        options = ["--model", str(model), "--threads", str(threads), "--log-level", "warning", *PLAIN]
        started = Replicas(Path(folder), free_ports(1)[0], n_servers, options)
        try:
            started.wait_ready()
            yield started
        finally:
            started.close()


def measure_gateway(model: Path, n_pairs: int) -> None:
    with replicas(1, len(os.sched_getaffinity(0)), model) as servers:
        (straight,) = servers.server_ports
        pairs = in_turn(
            n_pairs,
            lambda i: stream(servers.port, long_prompt(2 * i)),
            lambda i: stream(straight, long_prompt(2 * i + 1)),
        )
        short = in_turn(
            20 * n_pairs,
            lambda i: health(servers.port),
            lambda i: health(straight),
        )
    print(f"through nginx, against straight to the server; {n_pairs} pairs of {N_TOKENS} tokens:")
    show("until the first token, prompts of 500", "ms", 1e3, pairs, lambda timing: timing.first)
    show("a token after it", "ms", 1e3, pairs, lambda timing: timing.seconds_per_token)
    show("a whole answer", "s", 1, pairs, lambda timing: timing.last)
    show("a request without a model, GET /health", "ms", 1e3, short, lambda timing: timing.last)


def health(port: int) -> Timing:
    """On a connection of its own."""
    started = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    if status != http.HTTPStatus.OK:
        raise MeasureError(f"port {port}: GET /health gives {status}")
    seconds = time.monotonic() - started
    return Timing(seconds, seconds, 1)


def measure_replicas(model: Path, n_pairs: int) -> None:
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        several = stack.enter_context(replicas(2, max(1, cores // 2), model))
        alone = stack.enter_context(replicas(1, cores, model))
        users = stack.enter_context(ThreadPoolExecutor(2))

        def both(port: int, number: int) -> Timing:
            """Until both have what each of them waits for."""
            asked = [users.submit(stream, port, long_prompt(number + k)) for k in range(2)]
            answers = [each.result() for each in asked]
            return Timing(max(a.first for a in answers), max(a.last for a in answers), 2 * N_TOKENS)

        pairs = in_turn(n_pairs, lambda i: both(several.port, 4 * i), lambda i: both(alone.port, 4 * i + 2))
        single = in_turn(
            n_pairs,
            lambda i: stream(several.port, long_prompt(2 * i)),
            lambda i: stream(alone.port, long_prompt(2 * i + 1)),
        )
    what = f"two servers of {max(1, cores // 2)} threads, against one of {cores}"
    print(f"{what}; {n_pairs} pairs of {N_TOKENS} tokens:")
    show("two users at once, until both have their answer", "s", 1, pairs, lambda timing: timing.last)
    show("two users at once, until both have a first token", "s", 1, pairs, lambda timing: timing.first)
    show("one user alone, until the answer is whole", "s", 1, single, lambda timing: timing.last)


def measure_rpc(model: Path, n_pairs: int) -> None:
    check_build()
    worker_program = RPC_FOLDER / "bin" / "rpc-server"
    threads = str(len(os.sched_getaffinity(0)))
    ports = free_ports(4)
    endpoints = ",".join(f"127.0.0.1:{port}" for port in ports[:2])
    options = [
        "--model",
        str(model),
        "--n_ctx",
        str(N_CTX),
        "--n_threads",
        threads,
        "--n_threads_batch",
        threads,
    ]
    options += ["--interrupt_requests", "false"]
    serve = Path(__file__).with_name("rpc_serve.py")
    with tempfile.TemporaryDirectory(prefix="s2moe-measure-") as folder, ExitStack() as stack:

        def start(port: int, *command: str, **environment: str) -> None:
            log = Path(folder) / f"{port}.log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=file,
                    env={**os.environ, **environment},
                    preexec_fn=end_with_parent,
                )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            wait_for(port, process, log)

        for port in ports[:2]:
            start(port, str(worker_program), "--port", str(port), "--threads", threads)
        start(ports[2], sys.executable, str(serve), "--workers", endpoints, *options, "--port", str(ports[2]))
        start(
            ports[3],
            *(sys.executable, "-m", "llama_cpp.server", *options, "--port", str(ports[3])),
            LLAMA_CPP_LIB_PATH=str(RPC_FOLDER / "bin"),
            PYTHONPATH=str(RPC_FOLDER / "python"),
        )
        pairs = in_turn(
            n_pairs,
            lambda i: stream(ports[2], long_prompt(2 * i)),
            lambda i: stream(ports[3], long_prompt(2 * i + 1)),
        )
    print(f"two workers of {threads} threads, against the same llama.cpp in one process; {n_pairs} pairs:")
    show("until the first token, prompts of 500", "s", 1, pairs, lambda timing: timing.first)
    show("a token after it", "ms", 1e3, pairs, lambda timing: timing.seconds_per_token)


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until something listens. Raises MeasureError."""
    deadline = time.monotonic() + START_SECONDS
    while not listens(port):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise MeasureError("\n  ".join([f"what should listen on {port} did not start", *tail]))
        time.sleep(0.1)


def show_progress(line: str) -> None:
    print(line, file=sys.stderr)


SECTIONS: dict[str, Callable[[Path, int], Any]] = {
    "gateway": measure_gateway,
    "replicas": measure_replicas,
    "rpc": measure_rpc,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", choices=list(SECTIONS))
    parser.add_argument("--model", type=Path, help="GGUF file (default: the demo model)")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of requests (default %(default)s)")
    arguments = parser.parse_args()
    try:
        SECTIONS[arguments.section](
            arguments.model or ensure_demo_model(progress=show_progress), arguments.pairs
        )
    except (MeasureError, ReplicasError, RpcError) as error:
        print(f"measure: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
