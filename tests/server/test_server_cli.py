"""The command line: help, exit codes, one-line errors, and a whole server run as a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from s2moe.engine.messages import Speculation
from s2moe.server.cli import build_parser, main
from s2moe.server.serve import base_url, ready_text, to_configure
from s2moe.server.settings import Settings, env_of, flag_of, load_settings

from ports import free_port


def exit_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Returns the exit code and stderr, which must be one line."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    error = capsys.readouterr().err
    assert error.count("\n") <= 1, error
    return int(caught.value.code or 0), error


def test_help_of_serve_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in Settings.model_fields:
        assert flag_of(name) in text
        assert env_of(name) in text
    assert "default 8MiB" in text
    assert "default auto" in text
    assert "--memory-budget SIZE" in text
    assert "text|json" in text
    assert "--speculation s2moe|expert-skip|cascade|off" in text
    assert "--max-nodes N" in text
    assert "--reuse-cap N" in text
    assert "--error-budget X" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--nonsense"],
        ["serve", "--po", "80"],
        ["serve", "--port", "x"],
        ["serve", "--port"],
        ["nonsense"],
        [],
        ["demo-model", "--experts", "many"],
        ["inspect"],
        ["inspect", "m.gguf", "--memory-budget", "much"],
        ["inspect", "m.gguf", "--ctx", "-1"],
        ["serve", "--config", "/nonexistent.toml"],
        ["serve", "--port", "0", "--model", "/nonexistent.gguf"],
        ["serve", "--port", "0", "--model", "/"],
        ["serve", "--port", "0", "--model", __file__],
        ["serve", "--port", "0", "--model", __file__, "--chat-template-file", "/nonexistent.jinja"],
        ["serve", "--port", "0", "--model", __file__, "--api-key-file", "/nonexistent.key"],
        ["serve", "--port", "0", "--hot-experts", "/nonexistent.json"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, error = exit_of(capsys, *arguments)
    assert code == 2
    assert error.startswith("s2moe: error: ")


def test_usage_error_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--port" in exit_of(capsys, "serve", "--port", "x")[1]
    assert "--nonsense" in exit_of(capsys, "serve", "--nonsense")[1]


def test_unknown_flag_of_a_command_points_to_its_help_and_to_what_is_like_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unlike = exit_of(capsys, "serve", "--wrong", "1")[1]
    assert "--wrong 1 (see `s2moe serve --help`)" in unlike
    for arguments in (["--ctx-sise", "8"], ["--ctx-sise=8"], ["--port", "0", "--ctx-sise", "8"]):
        assert "; did you mean `--ctx-size`? (see `s2moe serve" in exit_of(capsys, "serve", *arguments)[1]
    assert (
        "`--max-tokens`? (see `s2moe profile"
        in exit_of(capsys, "profile", "--model", "m", "--prompts", "p", "--max-token", "1")[1]
    )


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--config", "check the path and its permissions"),
        ("--model", "or omit the option to serve the demo model"),
        ("--api-key-file", "check the path and its permissions"),
        ("--chat-template-file", "check the path and its permissions"),
        ("--hot-experts", "make one with `s2moe profile`, or omit the option"),
    ],
)
def test_missing_file_comes_with_a_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, remedy: str
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    arguments = ["serve", "--port", "0", "--model", str(model), flag, str(tmp_path / "nothing")]
    error = exit_of(capsys, *arguments)[1]
    assert error.startswith(f"s2moe: error: {flag}: ")
    assert error.strip().endswith(remedy)


def test_port_in_use_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = exit_of(capsys, "serve", "--model", str(model), "--port", str(port))
    assert code == 1
    assert f"127.0.0.1:{port}" in error
    assert "--port" in error


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version_is_printed(capsys: pytest.CaptureFixture[str], argument: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([argument])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("s2moe ")


def test_flags_of_switches_may_be_negated() -> None:
    parse = build_parser().parse_args
    assert parse(["serve", "--strict-model"]).strict_model is True
    assert parse(["serve", "--no-strict-model"]).strict_model is False
    assert not hasattr(parse(["serve"]), "strict_model")
    assert parse(["serve", "--cors-origin", "a", "--cors-origin", "b"]).cors_origin == ["a", "b"]


def test_settings_of_the_expert_cache_reach_the_engine(tmp_path: Path) -> None:
    given = {"memory_budget": "1500MiB", "vram_budget": "2GiB"}
    given |= {"io": "buffered", "reader": "threads", "hot_experts": "hot.json"}
    configure = to_configure(
        load_settings({**given, "expert_trace": str(tmp_path / "t")}), tmp_path / "m.gguf"
    )
    assert configure.memory_budget_bytes == 1500 * 2**20
    assert configure.vram_budget_bytes == 2**31
    assert (configure.io, configure.reader) == ("buffered", "threads")
    assert configure.hot_experts_path == str(Path.cwd() / "hot.json")
    assert configure.expert_trace_path == str(tmp_path / "t")
    assert configure.expert_policy == "cache"
    static = to_configure(load_settings({"expert_policy": "static"}), tmp_path / "m.gguf")
    assert static.expert_policy == "static"
    # the front end tells what it takes itself
    assert 20 * 2**20 < configure.front_end_bytes < 2**30


@pytest.mark.parametrize(
    ("size", "n_bytes"), [("auto", -1), (" Auto ", -1), ("0", 0), ("256MiB", 256 * 2**20), (None, -1)]
)
def test_settings_of_the_prompt_cache_reach_the_engine(
    tmp_path: Path, size: str | None, n_bytes: int
) -> None:
    given = {"prompt_cache_dir": "kept"} | ({} if size is None else {"prompt_cache_size": size})
    configure = to_configure(load_settings(given), tmp_path / "m.gguf")
    assert configure.prompt_cache_bytes == n_bytes
    assert configure.prompt_cache_dir == str(Path.cwd() / "kept")
    assert to_configure(load_settings({}), tmp_path / "m.gguf").prompt_cache_dir is None


def test_unset_settings_leave_the_choice_to_the_engine(tmp_path: Path) -> None:
    configure = to_configure(load_settings({}), tmp_path / "m.gguf")
    assert (configure.memory_budget_bytes, configure.n_batch) == (0, 0)
    assert (configure.hot_experts_path, configure.expert_trace_path) == (None, None)


def speculation_of(tmp_path: Path, *flags: str) -> Speculation:
    """What the engine is told by `s2moe serve` with these flags."""
    given = vars(build_parser().parse_args(["serve", *flags]))
    config = given.pop("config")
    del given["command"]
    return to_configure(load_settings(given, config), tmp_path / "m.gguf").speculation


def test_speculation_that_is_left_open_travels_as_none(tmp_path: Path) -> None:
    assert speculation_of(tmp_path) == Speculation(method="s2moe")
    assert speculation_of(tmp_path, "--draft-experts", "0", "--no-exact") == Speculation(method="s2moe")


def test_each_number_of_drafts_reaches_the_engine(tmp_path: Path) -> None:
    """Also the most there are: left open, a method may verify more."""
    told = speculation_of(tmp_path, "--speculation", "expert-skip", "--max-nodes", "7")
    assert told == Speculation(method="expert-skip", max_nodes=7)


def test_flags_of_speculation_reach_the_engine(tmp_path: Path) -> None:
    numbers = ("--draft-experts", "2", "--max-nodes", "4", "--reuse-strength", "0", "--reuse-cap", "16")
    switches = ("--exact", "--no-adaptive", "--no-reuse-gating", "--no-shared-context")
    told = speculation_of(
        tmp_path,
        *("--speculation", "cascade", "--preset", "fast", "--error-budget", "0.2", *numbers, *switches),
    )
    assert told == Speculation(
        method="cascade",
        preset="fast",
        exact=True,
        draft_experts=2,
        max_nodes=4,
        reuse_strength=0.0,
        reuse_cap=16,
        error_budget=0.2,
        adaptive=False,
        reuse_gating=False,
        shared_context=False,
    )


def test_speculation_comes_from_file_environment_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "s2moe.toml"
    config.write_text('speculation = "off"\npreset = "fast"\nadaptive = false\nreuse_strength = 2\n')
    monkeypatch.setenv("S2MOE_SPECULATION", "cascade")
    monkeypatch.setenv("S2MOE_SHARED_CONTEXT", "false")
    flags = ("--config", str(config), "--preset", "exact", "--shared-context")
    assert speculation_of(tmp_path, *flags) == Speculation(
        method="cascade", preset="exact", adaptive=False, reuse_strength=2.0
    )


def test_ready_text_holds_a_command_that_works_as_it_stands() -> None:
    text = ready_text(base_url("0.0.0.0", 80), "it's", None, has_key=True)
    assert "http://127.0.0.1:80/v1/chat/completions" in text
    assert "Authorization: Bearer" in text
    curl = text[text.index("curl") :]
    arguments = subprocess.run(
        ["sh", "-c", curl.replace("curl", 'printf "%s\\n"', 1)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert json.loads(arguments[-1])["model"] == "it's"
    assert base_url("::1", 1) == "http://[::1]:1"


ENGINE = '''
"""An engine process of the tests: speaks the wire protocol, plays what its mode says."""
import os, socket, sys, time
from s2moe.engine import messages as m

mode = os.environ["FAKE_ENGINE"]
connection = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
send = lambda message: connection.sendall(m.encode_frame(message))
send(m.Hello(protocol_version=m.PROTOCOL_VERSION, pid=os.getpid(), engine_version="0", llama_build="b0"))
reader = m.FrameReader(from_engine=False)
while True:
    data = connection.recv(65536)
    if not data:
        sys.exit(0)
    for message in reader.feed(data):
        if isinstance(message, m.Configure):
            if mode.startswith("fatal "):
                send(m.Fatal(code=mode.split()[1], message="the model is broken; take another"))
                sys.exit(1)
            time.sleep(0.5)
            send(m.Ready(model=m.ModelInfo(architecture="llama", name="x", quantization="q", size_bytes=1,
                 n_params=1, n_ctx=512, n_ctx_train=512, n_layer=1, n_vocab=10)))
        elif isinstance(message, m.Ping):
            send(m.Pong(nonce=message.nonce, state="idle"))
        elif isinstance(message, m.Shutdown):
            if mode != "saves":
                sys.exit(0)
        elif isinstance(message, m.Abort):
            send(m.Finished(request_id=message.request_id, reason="cancelled"))
        elif isinstance(message, m.Generate):
            send(m.Started(request_id=message.request_id, n_prompt_tokens=3))
            send(m.Step(request_id=message.request_id, content="a"))
            if mode == "long":
                continue
            time.sleep(1)
            send(m.Step(request_id=message.request_id, content="b"))
            send(m.Finished(request_id=message.request_id, reason="stop", n_completion_tokens=2))
'''

RUNNER = """
import sys
from s2moe.server import supervisor
supervisor.ENGINE_COMMAND = (sys.executable, sys.argv.pop(1))
from s2moe.server.cli import main
main()
"""


class Process:
    """`s2moe serve` with the engine above."""

    def __init__(self, tmp_path: Path, mode: str, *arguments: str, **variables: str) -> None:
        (tmp_path / "engine.py").write_text(ENGINE)
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", RUNNER, str(tmp_path / "engine.py"), "serve"]
        self.process = subprocess.Popen(
            [*command, "--model", str(tmp_path / "m.gguf"), "--port", str(port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FAKE_ENGINE": mode, **variables},
        )

    def until(self, status: str) -> None:
        """`gone`: nobody listens."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                found = httpx.get(f"{self.url}/health").json()["status"]
            except httpx.TransportError:
                found = "gone"
            if found == status:
                return
            time.sleep(0.01)
        raise AssertionError(f"never {status}")

    def end(self) -> tuple[int, str, str]:
        out, error = self.process.communicate(timeout=20)
        return self.process.returncode, out, error


BODY = {"stream": True, "messages": [{"role": "user", "content": "hi"}]}


def start(tmp_path: Path, mode: str, *arguments: str, **variables: str) -> Process:
    return Process(tmp_path, mode, *arguments, **variables)


def test_server_says_loading_then_ready_and_sigterm_lets_the_stream_finish(tmp_path: Path) -> None:
    server = start(tmp_path, "normal")
    try:
        server.until("loading")
        server.until("ok")
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=BODY, timeout=20) as reply:
            lines = reply.iter_lines()
            while '"content":"a"' not in next(lines):
                pass
            server.process.send_signal(signal.SIGTERM)
            server.until("draining")
            refused = httpx.post(f"{server.url}/v1/chat/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        code, out, error = server.end()
    finally:
        server.process.kill()
    assert code == 0, error
    assert f"s2moe is ready: {server.url}/v1 serves m" in out
    assert "Traceback" not in error


def test_stream_beyond_the_shutdown_timeout_is_cut_with_an_error_event(tmp_path: Path) -> None:
    server = start(tmp_path, "long", "--shutdown-timeout", "0.5")
    try:
        server.until("ok")
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=BODY, timeout=20) as reply:
            lines = reply.iter_lines()
            while '"content":"a"' not in next(lines):
                pass
            asked = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data:")]
        code, _, error = server.end()
    finally:
        server.process.kill()
    assert code == 0, error
    assert 0.4 < time.monotonic() - asked < 10
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutdown"
    assert "Traceback" not in error


def test_second_signal_does_not_wait(tmp_path: Path) -> None:
    server = start(tmp_path, "long", "--shutdown-timeout", "600")
    try:
        server.until("ok")
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=BODY, timeout=20) as reply:
            lines = reply.iter_lines()
            while '"content":"a"' not in next(lines):
                pass
            server.process.send_signal(signal.SIGINT)
            server.until("draining")
            server.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line.startswith("data:")]
            code, _, error = server.end()
    finally:
        server.process.kill()
    assert code == 0, error
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutdown"
    assert "waiting up to 600 s for 1 answer; a second signal (Ctrl-C) ends it at once" in error
    assert "ending at once, at the second signal signal=SIGINT" in error
    assert "ignored" not in error


def test_second_signal_does_not_wait_for_an_engine_that_saves(tmp_path: Path) -> None:
    server = start(tmp_path, "saves", "--prompt-cache-dir", str(tmp_path))
    try:
        server.until("ok")
        server.process.send_signal(signal.SIGINT)
        server.until("gone")
        asked = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        code, _, error = server.end()
    finally:
        server.process.kill()
    assert code == 0, error
    assert time.monotonic() - asked < 5
    assert "ignored" not in error


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("budget_too_small", 2),
        ("device_not_built", 2),
        ("hot_experts_invalid", 2),
        ("invalid_setting", 2),
        ("prompt_cache_dir_unusable", 2),
        # may pass
        ("device_unavailable", 1),
        ("insufficient_memory", 1),
        # no setting
        ("model_invalid", 1),
    ],
)
def test_engine_that_can_never_load_is_one_line_and_exit_code_2_where_a_setting_is_wrong(
    tmp_path: Path, reason: str, expected: int
) -> None:
    server = start(tmp_path, f"fatal {reason}")
    try:
        code, _, error = server.end()
    finally:
        server.process.kill()
    assert code == expected
    (line,) = [line for line in error.splitlines() if line.startswith("s2moe: error: ")]
    assert "the model is broken; take another" in line
    assert error.count("the model is broken") == 1
    assert "Traceback" not in error


def test_variable_that_is_no_setting_is_warned_of_once(tmp_path: Path) -> None:
    variables = {"S2MOE_PRT": "1", "S2MOE_CACHE_DIR": str(tmp_path), "S2MOE_THREADS": "1", "S2MOE_EMPTY": ""}
    server = start(tmp_path, "fatal model_invalid", **variables)
    try:
        _, _, error = server.end()
    finally:
        server.process.kill()
    (line,) = [line for line in error.splitlines() if "there is no such setting" in line]
    assert " WARNING " in line
    assert line.endswith("S2MOE_PRT is set, but there is no such setting; did you mean `S2MOE_PORT`?")


@pytest.mark.parametrize(
    ("arguments", "warns"),
    [
        (("--host", "0.0.0.0"), True),
        (("--host", "0.0.0.0", "--api-key", "sesame-open"), False),
        ((), False),
    ],
)
def test_server_that_all_may_use_warns(tmp_path: Path, arguments: tuple[str, ...], warns: bool) -> None:
    server = start(tmp_path, "normal", *arguments)
    try:
        server.until("ok")
        server.process.send_signal(signal.SIGTERM)
        code, _, error = server.end()
    finally:
        server.process.kill()
    assert code == 0, error
    assert ("anyone who can reach this address" in error) == warns
    if warns:
        assert "--api-key-file" in error
