"""Stock llama.cpp being measured: llama-cpp-python's `Llama` on an unpatched libllama with released flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from s2moe.bench.answer import Answer
from s2moe.bench.process import LimitReport, ReadLimit, limited

REPOSITORY = Path(__file__).resolve().parents[1]
VARIANT = "stock-default-flags"
LIBRARY = REPOSITORY / "build" / "native" / VARIANT / "bin"

WORKER = """
import json, sys, time
from llama_cpp import Llama, llama_cpp
path, n_threads, n_ctx, repack = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
default_params = llama_cpp.llama_model_default_params

def params():
    chosen = default_params()
    chosen.use_extra_bufts = repack
    return chosen

llama_cpp.llama_model_default_params = params

def read_bytes():
    with open("/proc/self/io") as file:
        return int(file.read().partition("\\nread_bytes: ")[2].split()[0])

llama = Llama(path, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, verbose=False)
for line in sys.stdin:
    request = json.loads(line)
    text, times, first = "", [], 0
    started, started_ns = read_bytes(), time.monotonic_ns()
    for chunk in llama.create_chat_completion(**request, stream=True):
        piece = chunk["choices"][0]["delta"].get("content")
        if piece:
            times.append(time.monotonic_ns())
            first = first or read_bytes()
            text += piece
    print(json.dumps({
        "text": text, "n_prompt_tokens": 0, "n_tokens": len(times), "started_ns": started_ns,
        "first_ns": times[0], "last_ns": times[-1], "started_read_bytes": started,
        "first_read_bytes": first, "last_read_bytes": read_bytes(),
    }), flush=True)
"""


class StockError(Exception):
    """Stock llama.cpp ended instead of answering."""


def build_stock() -> None:
    """Builds the unpatched library where it is missing or old. Not while anything is measured."""
    subprocess.run([sys.executable, "native/build.py", "--variant", VARIANT], cwd=REPOSITORY, check=True)


class StockLlama:
    """A process that loads the model by mmap, as llama.cpp does by itself. Needs build_stock() before, and
    `close()` at the end."""

    def __init__(
        self,
        model: Path,
        work: Path,
        *,
        n_threads: int,
        n_ctx: int,
        limit_bytes: int | None = None,
        read_limit: ReadLimit | None = None,
    ) -> None:
        """Under a limit weights are not repacked: that is a second copy of them all, in anonymous memory, and
        ends in the kernel's killing the process. A read limit needs a memory limit."""
        repack = limit_bytes is None
        command = [sys.executable, "-c", WORKER, str(model), str(n_threads), str(n_ctx), str(repack)]
        self._report = work / "stock-memlimit.json"
        assert limit_bytes is not None or read_limit is None
        if limit_bytes is not None:
            command = limited(command, limit_bytes, self._report, read_limit=read_limit)
        self._log = work / "stock.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "LLAMA_CPP_LIB_PATH": str(LIBRARY)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def chat(self, messages: list[dict[str, str]], n_tokens: int) -> Answer:
        """A greedy answer of at most n_tokens; its prompt is not counted. Raises StockError."""
        request: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": n_tokens}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass
        line = stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace").strip().splitlines()[-3:]
            raise StockError("\n  ".join([f"stock llama.cpp ended with {self._process.wait()}", *tail]))
        return Answer(**json.loads(line))

    def close(self) -> LimitReport | None:
        """What memlimit reported, if it ran."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        return LimitReport.read(self._report) if self._report.exists() else None
