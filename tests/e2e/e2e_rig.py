"""`s2moe serve` as its users run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from ports import free_port

S2MOE = Path(sys.executable).with_name("s2moe")


def first_child(pid: int) -> int:
    """Waits until a process has a child and returns its pid."""
    deadline = time.monotonic() + 30
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (pids := children.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(pids[0])


class ServeProcess:
    """The command, its log and a client."""

    def __init__(
        self,
        log: Path,
        *arguments: str,
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`wrapper`: a command that runs the server as its child; `environment` adds to this process's."""
        self.port = free_port()
        self.log = log
        self._is_wrapped = bool(wrapper)
        command = [*wrapper, str(S2MOE), "serve", "--port", str(self.port), *arguments]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                # the user's cache directory is no place for the habits of tests
                env={**os.environ, "S2MOE_KEEP_EXPERT_COUNTS": "false", **(environment or {})},
            )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def health(self) -> int:
        """The status of /health, 0 while nobody listens."""
        try:
            return self.client.get("/health").status_code
        except httpx.TransportError:
            return 0

    def wait_ready(self, timeout_seconds: float = 120) -> None:
        deadline = time.monotonic() + timeout_seconds
        while self.health() != httpx.codes.OK:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def front_end_pid(self) -> int:
        return first_child(self.process.pid) if self._is_wrapped else self.process.pid

    def engine_pid(self) -> int:
        """Waits for the engine process and returns its pid."""
        return first_child(self.front_end_pid())

    def kill_engine(self) -> int:
        pid = self.engine_pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def metric(self, sample: str) -> float:
        """The value of one line of /metrics, named with its labels."""
        for line in self.client.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        raise AssertionError(f"/metrics has no {sample}")

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def curl(url: str, body: dict[str, Any], *flags: str) -> subprocess.Popen[bytes]:
    """curl as in the README, its bytes on stdout."""
    command = ["curl", "-sN", *flags, f"{url}/v1/chat/completions"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def events(data: bytes) -> list[Any]:
    """The JSON of each SSE event; `[DONE]` stays text, comments are left out."""
    blocks = [block for block in data.decode().split("\n\n") if block and not block.startswith(":")]
    payloads = [block.removeprefix("data: ") for block in blocks]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]
