"""`s2moe serve` being measured: its two processes, a streaming client, its metrics."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from s2moe.bench.answer import Answer
from s2moe.bench.http_client import httpx
from s2moe.bench.process import (
    LimitReport,
    ReadLimit,
    limited,
    peak_rss_bytes,
    read_bytes,
    wait_for_child,
)

READY_SECONDS = 300.0
STOP_SECONDS = 60.0
PLAIN_DECODING = ("--speculation", "off")
"""Flags of benchmarks of what is below speculation: one token per step."""
ACCESS_LOGGER = " s2moe.server.access "
DATA = "data: {"
DATA_PREFIX_LENGTH = len("data: ")


class ServingError(Exception):
    """The server did not start or did not answer; the message ends with the end of its log."""


def end_of_log(log: str, n_lines: int = 5) -> list[str]:
    """The last lines of a server's log but those of requests: polls of /health push a reason out of sight."""
    return [line for line in log.strip().splitlines() if ACCESS_LOGGER not in line][-n_lines:]


class Serving:
    """The whole server, under a memory limit, maybe a read limit too, or without. `close()` ends it."""

    def __init__(
        self,
        model: Path,
        work: Path,
        *flags: str,
        cache_directory: Path,
        limit_bytes: int | None = None,
        read_limit: ReadLimit | None = None,
        program: Sequence[str] | None = None,
    ) -> None:
        """Starts it and waits until it is ready. `work` holds its log, `cache_directory` what it keeps.
        A read limit needs a memory limit. `program`: another command than this environment's `s2moe`.

        Raises ServingError.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = list(program or (str(Path(sys.executable).with_name("s2moe")),))
        command += ["serve", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), *flags]
        self._report = work / "memlimit.json"
        assert limit_bytes is not None or read_limit is None
        if limit_bytes is not None:
            command = limited(command, limit_bytes, self._report, read_limit=read_limit)
        self._log = work / "serve.log"
        environment = {**os.environ, "S2MOE_CACHE_DIR": str(cache_directory)}
        with self._log.open("wb") as log:
            started = time.monotonic()
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
        try:
            self._wait_ready()
            self.start_seconds = time.monotonic() - started
            pid = self._process.pid
            self.front_end_pid = pid if limit_bytes is None else wait_for_child(pid)
            self.engine_pid = wait_for_child(self.front_end_pid)
            self.start_read_bytes = read_bytes(self.engine_pid)
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                if self._client.get("/health").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failure("s2moe serve did not become ready")
            time.sleep(0.02)

    def _failure(self, what: str) -> ServingError:
        return ServingError("\n  ".join([what, *end_of_log(self._log.read_text(errors="replace"))]))

    def chat(
        self, messages: list[dict[str, str]], n_tokens: int, options: dict[str, Any] | None = None
    ) -> Answer:
        """Streams a greedy answer of at most n_tokens. `options`: the request's field `s2moe`, if it has one.

        Raises ServingError.
        """
        body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": n_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if options is not None:
            body["s2moe"] = options
        pid = self.engine_pid
        text, usage = "", None
        timings: dict[str, float] = {}
        speculation: dict[str, Any] | None = None
        started_read_bytes, started_ns = read_bytes(pid), time.monotonic_ns()
        first_ns = last_ns = first_read_bytes = 0
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise self._failure(f"the request was refused: {_message(response)}")
                for line in response.iter_lines():
                    now = time.monotonic_ns()
                    if not line.startswith(DATA):
                        continue
                    event = json.loads(line[DATA_PREFIX_LENGTH:])
                    if "error" in event:
                        raise self._failure(f"the answer failed: {event['error']['message']}")
                    usage = event.get("usage") or usage
                    timings = event.get("timings") or timings
                    speculation = event.get("speculation") or speculation
                    if event["choices"] and (piece := event["choices"][0]["delta"].get("content")):
                        if first_ns == 0:
                            first_ns, first_read_bytes = now, read_bytes(pid)
                        last_ns = now
                        text += piece
                last_read_bytes = read_bytes(pid)
        except (httpx.TransportError, FileNotFoundError) as error:
            raise self._failure(f"the connection broke ({error})") from error
        if usage is None or first_ns == 0:
            raise self._failure("the answer has no text or no usage")
        return Answer(
            text=text,
            n_prompt_tokens=usage["prompt_tokens"],
            n_tokens=usage["completion_tokens"],
            started_ns=started_ns,
            first_ns=first_ns,
            last_ns=last_ns,
            started_read_bytes=started_read_bytes,
            first_read_bytes=first_read_bytes,
            last_read_bytes=last_read_bytes,
            timings=timings,
            speculation=speculation,
        )

    def metrics(self) -> Samples:
        return Samples(self._client.get("/metrics").text)

    def peak_rss_bytes(self) -> dict[str, int]:
        return {
            "front_end": peak_rss_bytes(self.front_end_pid),
            "engine": peak_rss_bytes(self.engine_pid),
        }

    def close(self) -> LimitReport | None:
        """Stops the server; what memlimit reported, if it ran."""
        self._client.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return LimitReport.read(self._report) if self._report.exists() else None


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"


class Samples:
    """One scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def sum(self, name: str, **labels: str) -> float:
        """Sum of the samples of a name whose labels have these values. Raises KeyError when there is none."""
        values = [
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not values:
            raise KeyError(f"/metrics has no {name} with {labels}")
        return float(sum(values))
