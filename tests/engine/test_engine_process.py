"""The engine process: start, refusals, aborts, heartbeat, end."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_rig import Chat, EngineProcess, is_alive

from s2moe.engine import messages as wire

FRANCE = ("user", "What is the capital of France?")
STORY = ("user", "Tell me a long story about a river and the people who live beside it.")
LONG_PROMPT = ("user", "word " * 1800)


def test_hello_and_progress_come_before_ready(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    engine = spawn()
    hello = engine.receive()
    assert isinstance(hello, wire.Hello)
    assert (hello.protocol_version, hello.pid) == (wire.PROTOCOL_VERSION, engine.process.pid)
    assert hello.llama_build.startswith("0.3.36-")
    engine.send(wire.Configure(model_path=str(tiny_model_path), n_ctx=512))
    received = engine.receive_until(wire.Ready)
    progress = [m for m in received if isinstance(m, wire.LoadProgress)]
    assert list(dict.fromkeys(p.phase for p in progress)) == ["library", "plan", "model", "context", "warmup"]
    weights = [p.fraction for p in progress if p.phase == "model"]
    assert weights == sorted(weights)
    assert weights[-1] == 1.0
    ready = received[-1]
    assert isinstance(ready, wire.Ready)
    assert (ready.model.n_expert, ready.model.n_expert_used, ready.model.n_ctx) == (8, 2, 512)
    assert ready.model.architecture == "llama"
    engine.send(wire.Shutdown())
    assert engine.process.wait(10) == 0


def bad_models(tmp_path: Path, good: Path) -> dict[str, Path]:
    missing = tmp_path / "missing.gguf"
    not_gguf = tmp_path / "notes.gguf"
    not_gguf.write_text("hello")
    empty = tmp_path / "empty.gguf"
    empty.touch()
    truncated = tmp_path / "truncated.gguf"
    with good.open("rb") as file:
        truncated.write_bytes(file.read(10_000_000))
    header_only = tmp_path / "header.gguf"
    header_only.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    return {
        "does not exist": missing,
        "is not a GGUF file": not_gguf,
        "is not a GGUF file ": empty,
        "cannot load": truncated,
        "cannot load ": header_only,
        "cannot be read": tmp_path,
    }


def test_models_that_cannot_load_are_refused_with_a_reason(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path, tmp_path: Path
) -> None:
    for reason, path in bad_models(tmp_path, tiny_model_path).items():
        engine = spawn()
        fatal = engine.load(path)
        assert isinstance(fatal, wire.Fatal)
        assert reason.strip() in fatal.message
        assert str(path) in fatal.message
        assert "\n" not in fatal.message
        assert not fatal.retryable
        assert engine.process.wait(10) != 0


@pytest.mark.parametrize(
    ("options", "code", "remedy"),
    [
        ({"device": "tpu"}, "invalid_device", "--device"),
        ({"n_ctx": 20_000_000}, "context_failed", "--ctx-size"),
        ({"chat_template": "{% for %}"}, "template_invalid", "--chat-template-file"),
        ({"memory_budget_bytes": 100 << 20}, "budget_too_small", "--memory-budget"),
        ({"memory_budget_bytes": 1 << 50}, "budget_too_large", "omit --memory-budget"),
        ({"reader": "carrier pigeon"}, "invalid_setting", "--reader"),
        ({"expert_policy": "lru"}, "invalid_setting", "--expert-policy"),
        ({"expert_trace_path": "/"}, "trace_unwritable", "--expert-trace"),
    ],
)
def test_configurations_that_cannot_work_name_the_flag(
    spawn: Callable[[], EngineProcess],
    tiny_model_path: Path,
    options: dict[str, object],
    code: str,
    remedy: str,
) -> None:
    fatal = spawn().load(tiny_model_path, **options)
    assert isinstance(fatal, wire.Fatal)
    assert fatal.code == code
    assert remedy in fatal.message


def test_codes_of_wrong_settings_are_those_of_refusals() -> None:
    engine = Path(wire.__file__).parent
    sources = "".join(path.read_text() for path in engine.glob("*.py") if path.name != "messages.py")
    assert [code for code in wire.WRONG_SETTING_CODES if f'"{code}"' not in sources] == []


def test_context_is_what_the_plan_says_and_large_enough_for_drafts(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    """llama.cpp would round it up behind our back."""
    ready = spawn().load(tiny_model_path, n_ctx=1, speculation=wire.Speculation())
    assert isinstance(ready, wire.Ready), ready
    assert ready.plan is not None
    assert ready.model.n_ctx == 256
    assert "(256 tokens)" in ready.plan.lines[0]
    assert (ready.model.speculation_method, ready.model.speculation_limit) == ("s2moe", "")


def abort_latency(chat: Chat, request: wire.Generate, *, after: type[wire.FromEngine], delay: float) -> float:
    """Seconds from the abort to Finished(cancelled)."""
    chat.engine.send(request)
    chat.engine.receive_until(after)
    time.sleep(delay)
    thrown = time.monotonic()
    chat.engine.send(wire.Abort(request_id=request.request_id))
    finished = chat.engine.receive_until(wire.Finished)[-1]
    latency = time.monotonic() - thrown
    assert isinstance(finished, wire.Finished)
    assert finished.reason == "cancelled"
    return latency


def test_abort_takes_effect_within_100_ms(chat: Chat) -> None:
    prefill, decode = [], []
    for round_ in range(5):
        # a new first word, so that nothing of the prompt is cached
        prompt = ("user", f"{round_} {LONG_PROMPT[1]}")
        request = chat.request(("system", f"round {round_}"), prompt, max_tokens=None)
        prefill.append(abort_latency(chat, request, after=wire.Started, delay=0.05 + 0.07 * round_))
        request = chat.request(STORY, max_tokens=None)
        decode.append(abort_latency(chat, request, after=wire.Step, delay=0.01 * round_))
    print(f"abort latency: prefill {prefill}, decode {decode}")
    assert statistics.median(prefill) < 0.1
    assert statistics.median(decode) < 0.1


def test_abort_leaves_the_cache_consistent(chat: Chat) -> None:
    expected, _ = chat.ask(STORY, max_tokens=24)
    for delay in (0.0, 0.02, 0.11, 0.3):
        request = chat.request(STORY, ("assistant", "x"), LONG_PROMPT, max_tokens=None)
        abort_latency(chat, request, after=wire.Started, delay=delay)
        text, finished = chat.ask(STORY, max_tokens=24)
        assert text == expected
        assert finished.n_cached_tokens > 0


def test_abort_of_another_request_does_nothing(chat: Chat) -> None:
    request = chat.request(FRANCE)
    chat.engine.send(request)
    chat.engine.receive_until(wire.Started)
    chat.engine.send(wire.Abort(request_id="somebody else's"))
    finished = chat.engine.receive_until(wire.Finished)[-1]
    assert isinstance(finished, wire.Finished)
    assert finished.reason == "stop"
    chat.engine.send(wire.Abort(request_id=request.request_id))
    assert chat.ask(FRANCE)[1].reason == "stop", "a late abort must not hit the next request"


def test_abort_sent_right_behind_its_request_is_not_lost(chat: Chat) -> None:
    for _ in range(10):
        request = chat.request(STORY, max_tokens=None)
        chat.engine.send(request)
        chat.engine.send(wire.Abort(request_id=request.request_id))
        finished = chat.engine.receive_until(wire.Finished)[-1]
        assert isinstance(finished, wire.Finished)
        assert finished.reason == "cancelled"


def test_heartbeat_is_answered_during_a_long_prefill(chat: Chat) -> None:
    request = chat.request(("system", "heartbeat"), LONG_PROMPT, max_tokens=1)
    chat.engine.send(request)
    chat.engine.receive_until(wire.Started)
    ages, delays = [], []
    for nonce in range(5):
        sent = time.monotonic()
        chat.engine.send(wire.Ping(nonce=nonce))
        pong = chat.engine.receive_until(wire.Pong)[-1]
        delays.append(time.monotonic() - sent)
        assert isinstance(pong, wire.Pong)
        assert (pong.state, pong.request_id, pong.nonce) == ("prefill", request.request_id, nonce)
        ages.append(pong.step_age_seconds)
        time.sleep(0.05)
    chat.engine.receive_until(wire.Finished)
    assert statistics.median(delays) < 0.1
    assert max(ages) > 0.04, "the age grows while one native call runs"
    chat.engine.send(wire.Ping(nonce=99))
    pong = chat.engine.receive_until(wire.Pong)[-1]
    assert isinstance(pong, wire.Pong)
    assert (pong.state, pong.step_age_seconds) == ("idle", 0.0)


def test_exits_when_the_connection_closes_even_while_busy(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    engine = spawn()
    engine.load(tiny_model_path, n_ctx=2048)
    engine.send(Chat(engine).request(LONG_PROMPT, max_tokens=None))
    engine.receive_until(wire.Started)
    started = time.monotonic()
    engine.socket.close()
    engine.process.wait(5)
    assert time.monotonic() - started < 1


def test_dies_with_its_parent(tiny_model_path: Path, tmp_path: Path) -> None:
    """kill -9 of the front end while the engine is in a native call: nothing is left behind."""
    pid_file = tmp_path / "pid"
    parent = (
        "import socket, subprocess, sys, time\n"
        "ours, theirs = socket.socketpair()\n"
        "engine = subprocess.Popen([sys.executable, '-m', 's2moe.engine', '--fd', str(theirs.fileno())],"
        " pass_fds=[theirs.fileno()])\n"
        "ours.recv(100)\n"
        f"open({str(pid_file)!r}, 'w').write(str(engine.pid))\n"
        "time.sleep(60)\n"
    )
    front_end = subprocess.Popen([sys.executable, "-c", parent])
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    engine_pid = int(pid_file.read_text())
    assert is_alive(engine_pid)
    front_end.kill()
    front_end.wait()
    deadline = time.monotonic() + 2
    while is_alive(engine_pid):
        assert time.monotonic() < deadline, "the engine outlived its front end"
        time.sleep(0.01)


def test_garbage_on_the_socket_ends_the_engine(spawn: Callable[[], EngineProcess]) -> None:
    engine = spawn()
    engine.receive()
    engine.socket.sendall(b"\xff" * 64)
    assert engine.process.wait(5) == 0


def test_ctrl_c_in_the_terminal_is_not_for_the_engine(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    engine = spawn()
    engine.load(tiny_model_path, n_ctx=512)
    os.kill(engine.process.pid, signal.SIGINT)
    assert Chat(engine).ask(FRANCE)[1].reason == "stop"
