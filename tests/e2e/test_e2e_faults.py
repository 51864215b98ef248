"""The engine dies, the server is told to stop, the model is wrong: what users and operators see."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_rig import S2MOE, ServeProcess, curl, events

from s2moe.engine.native import Library

STORY = "Tell me a long story about a river and the people who live beside it."
STREAM = {"stream": True, "max_tokens": 3000, "messages": [{"role": "user", "content": STORY}]}


@pytest.fixture
def serve(tmp_path: Path, tiny_model_path: Path) -> Iterator[Callable[..., ServeProcess]]:
    started: list[ServeProcess] = []

    def start(*arguments: str) -> ServeProcess:
        log = tmp_path / f"log{len(started)}"
        started.append(ServeProcess(log, "--model", str(tiny_model_path), "--ctx-size", "4096", *arguments))
        return started[-1]

    yield start
    for process in started:
        process.close()


def read_some(stream: subprocess.Popen[bytes], n_events: int) -> bytes:
    assert stream.stdout is not None
    data = b""
    while data.count(b"\n\n") < n_events:
        data += stream.stdout.readline()
    return data


def test_kill_9_of_the_engine_ends_the_stream_with_an_error_and_the_next_request_works(
    serve: Callable[..., ServeProcess],
) -> None:
    server = serve()
    server.wait_ready()
    stream = curl(server.url, STREAM)
    data = read_some(stream, 5)
    killed = server.kill_engine()
    at = time.monotonic()
    assert stream.stdout is not None
    data += stream.stdout.read()
    print(f"error event after {time.monotonic() - at:.3f} s")
    assert time.monotonic() - at < 1
    last = events(data)[-1]
    assert last["error"]["type"] == "server_error"
    assert last["error"]["code"] == "engine_died"
    assert b"[DONE]" not in data
    answer = server.chat("What is the capital of France?")
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert server.engine_pid() != killed
    assert server.metric('s2moe_engine_restarts_total{reason="crash"}') == 1


def test_queued_request_survives_the_death_of_the_engine(serve: Callable[..., ServeProcess]) -> None:
    server = serve()
    server.wait_ready()
    running = curl(server.url, STREAM)
    read_some(running, 3)
    queued = curl(server.url, {"messages": [{"role": "user", "content": "What is the capital of France?"}]})
    while server.metric("s2moe_requests_waiting") == 0:
        time.sleep(0.01)
    server.kill_engine()
    output, _ = queued.communicate(timeout=60)
    assert b"Paris" in output
    running.wait(10)


def test_an_engine_that_keeps_dying_ends_the_server_with_an_error(serve: Callable[..., ServeProcess]) -> None:
    server = serve()
    server.wait_ready()
    seen: set[int] = set()
    deadline = time.monotonic() + 60
    while server.process.poll() is None and time.monotonic() < deadline:
        try:
            pid = server.engine_pid()
        except (AssertionError, FileNotFoundError):
            break
        if pid not in seen:
            seen.add(pid)
            server.kill_engine()
        time.sleep(0.02)
    assert server.process.wait(10) == 1
    assert len(seen) == 5
    assert "signal 9" in server.log.read_text().strip().splitlines()[-1]


def test_sigterm_finishes_the_running_request_and_exits_0(serve: Callable[..., ServeProcess]) -> None:
    server = serve("--shutdown-timeout", "120")
    server.wait_ready()
    stream = curl(server.url, {**STREAM, "max_tokens": 60})
    data = read_some(stream, 3)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    refused = server.chat("too late")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert stream.stdout is not None
    data += stream.stdout.read()
    assert events(data)[-1] == "[DONE]"
    assert server.process.wait(30) == 0


def test_sigterm_cuts_what_does_not_finish_in_time(serve: Callable[..., ServeProcess]) -> None:
    server = serve("--shutdown-timeout", "0.3")
    server.wait_ready()
    engine = server.engine_pid()
    stream = curl(server.url, STREAM)
    data = read_some(stream, 3)
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert stream.stdout is not None
    data += stream.stdout.read()
    assert "error" in events(data)[-1]
    assert server.process.wait(10) == 0
    assert time.monotonic() - started < 5
    assert not Path(f"/proc/{engine}").exists()


def test_health_says_loading_before_ready(serve: Callable[..., ServeProcess]) -> None:
    server = serve()
    statuses = []
    while (status := server.health()) != 200:
        statuses.append(status)
        time.sleep(0.005)
    assert 503 in statuses


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "/nowhere/m.gguf"], "/nowhere/m.gguf does not exist"),
        (["--model", "/etc/hostname"], "is not a GGUF file"),
        (["--port", "99999999"], "--port"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--device", "tpu"], "--device"),
        (["--ctx-size", "9999999"], "--ctx-size"),
    ],
)
def test_wrong_settings_end_with_one_clear_line(
    arguments: list[str], expected: str, tiny_model_path: Path
) -> None:
    command = [str(S2MOE), "serve", "--port", "0"]
    if "--model" not in arguments:
        command += ["--model", str(tiny_model_path)]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    assert expected in result.stderr.strip().splitlines()[-1]


@pytest.mark.skipif(Library().build_info()["cuda"], reason="the libraries are built with CUDA")
def test_gpu_that_the_build_cannot_use_is_refused_before_loading(tiny_model_path: Path) -> None:
    command = [str(S2MOE), "serve", "--port", "0", "--model", str(tiny_model_path), "--device", "cuda"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("s2moe: error: engine could not start: --device cuda, but this build has no CUDA")
    for text in ("make cuda", "--device cpu"):
        assert text in last
    for words in ("loading plan", "loading model", "memory budget", "is ready", "restarting"):
        assert words not in result.stderr + result.stdout


def test_device_is_told(serve: Callable[..., ServeProcess]) -> None:
    server = serve()
    server.wait_ready()
    assert "the model runs on the CPU" in server.log.read_text()
    (card,) = server.client.get("/v1/models").json()["data"]
    assert [device["kind"] for device in card["meta"]["devices"]] == ["cpu"]
    assert 's2moe_device_info{compute_capability="",device="cpu"' in server.client.get("/metrics").text


def test_prompt_text_stays_out_of_the_log(serve: Callable[..., ServeProcess]) -> None:
    server = serve("--log-level", "debug")
    server.wait_ready()
    server.chat("xyzzy-secret-word", max_tokens=2)
    server.chat("xyzzy-secret-word " * 3000)
    assert server.chat("hello", grammar='root ::= "xyzzy-secret-word" (').status_code == 400
    undefined = server.chat("hello", grammar="root ::= xyzzy-secret-word")
    assert undefined.status_code == 400
    assert "xyzzy-secret-word" in undefined.json()["error"]["message"]
    server.kill_engine()
    server.wait_ready()
    log = server.log.read_text()
    assert "xyzzy" not in log
    assert "POST" in log
