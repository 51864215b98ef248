"""Decode speed through HTTP against stock llama.cpp in the same run.

    .venv/bin/python -m s2moe.bench.decode_speed [--model PATH] [--tokens 128] [--rounds 7]

The opponent is llama-cpp-python's own `Llama` on an unpatched libllama with its released flags (built here
when missing), in a process of its own; ours is `s2moe serve` read by an HTTP client. Same file, same threads,
same greedy text. Requests alternate; speed is tokens per second between the first and the last token. Prints
medians and the ratio of each pair. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import httpx

from s2moe.engine.cpu import default_thread_count
from s2moe.engine.demo_model import ensure_demo_model

REPOSITORY = Path(__file__).resolve().parents[1]
SYSTEM = "You are a helpful assistant."
PROMPT = "Tell me a long story about a river and the people who live beside it."
N_CTX = 2048

STOCK_WORKER = """
import json, sys, time
from llama_cpp import Llama
path, n_threads, n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llama = Llama(path, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, verbose=False)
for line in sys.stdin:
    request = json.loads(line)
    times, text = [], ""
    for chunk in llama.create_chat_completion(**request, stream=True):
        piece = chunk["choices"][0]["delta"].get("content")
        if piece:
            times.append(time.monotonic())
            text += piece
    speed = (len(times) - 1) / (times[-1] - times[0])
    print(json.dumps({"tokens_per_second": speed, "text": text}), flush=True)
"""


class Stock:
    """llama_cpp.Llama on the unpatched library."""

    def __init__(self, model: Path, n_threads: int) -> None:
        subprocess.run(
            [sys.executable, "native/build.py", "--variant", "stock-default-flags"],
            cwd=REPOSITORY,
            check=True,
        )
        library = REPOSITORY / "build" / "native" / "stock-default-flags" / "bin"
        self._process = subprocess.Popen(
            [sys.executable, "-c", STOCK_WORKER, str(model), str(n_threads), str(N_CTX)],
            env={**os.environ, "LLAMA_CPP_LIB_PATH": str(library)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, request: dict[str, Any]) -> tuple[float, str]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        result = json.loads(stdout.readline())
        return result["tokens_per_second"], result["text"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Ours:
    """`s2moe serve` and an HTTP client."""

    def __init__(self, model: Path, n_threads: int, log: IO[bytes]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [str(Path(sys.executable).with_name("s2moe")), "serve", "--model", str(model)]
        command += ["--port", str(port), "--threads", str(n_threads), "--ctx-size", str(N_CTX)]
        self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
        deadline = time.monotonic() + 120
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("s2moe serve did not become ready")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return self._client.get("/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def run(self, request: dict[str, Any]) -> tuple[float, str]:
        times, text = [], ""
        with self._client.stream(
            "POST", "/v1/chat/completions", json={**request, "stream": True}
        ) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                piece = json.loads(line[len("data: ") :])["choices"][0]["delta"].get("content")
                if piece:
                    times.append(time.monotonic())
                    text += piece
        return (len(times) - 1) / (times[-1] - times[0]), text

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF (default: the 16-expert demo model)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=default_thread_count())
    arguments = parser.parse_args()
    model = arguments.model or ensure_demo_model(progress=print)
    request = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}],
        "temperature": 0.0,
        "max_tokens": arguments.tokens,
    }
    stock = Stock(model, arguments.threads)
    with open(os.devnull, "wb") as log:  # noqa: PTH123
        ours = Ours(model, arguments.threads, log)
    try:
        stock.run(request)
        ours.run(request)
        pairs = []
        for round_ in range(arguments.rounds):
            # whoever goes first changes, so that a drifting machine favours neither
            order = (stock, ours) if round_ % 2 == 0 else (ours, stock)
            results = {runner: runner.run(request) for runner in order}
            pairs.append((results[ours][0], results[stock][0]))
            same = "same text" if results[ours][1] == results[stock][1] else "other text"
            print(f"  ours {pairs[-1][0]:6.2f} tok/s   stock {pairs[-1][1]:6.2f} tok/s   {same}")
    finally:
        ours.close()
        stock.close()
    ratios = [a / b for a, b in pairs]
    print(
        f"median: ours {statistics.median(a for a, _ in pairs):.2f} tok/s, stock llama.cpp "
        f"{statistics.median(b for _, b in pairs):.2f} tok/s, ratio {statistics.median(ratios):.3f} "
        f"(of pairs {min(ratios):.3f} to {max(ratios):.3f}), {arguments.threads} threads"
    )


if __name__ == "__main__":
    main()
