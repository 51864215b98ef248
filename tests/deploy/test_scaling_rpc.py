"""Layers of one model on two local workers, where the build with RPC is; `make rpc-check` makes it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from ports import free_port
from waiting import PATIENCE_SECONDS, until

SCALING = Path(__file__).resolve().parents[2] / "deploy" / "scaling"
sys.path.insert(0, str(SCALING))

import rpc_serve  # noqa: E402
from processes import end_with_parent, listens  # noqa: E402
from rpc_serve import FOLDER, RpcError, check_build, check_worker  # noqa: E402

MUST_RUN = bool(os.environ.get("S2MOE_RPC_CHECK"))
"""Set by `make rpc-check`: a test that cannot run fails."""
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def require_build(built: Path, *, must_run: bool) -> None:
    try:
        check_build(built)
    except RpcError as error:
        if must_run:
            pytest.fail(str(error))
        pytest.skip(f"{error}, which takes minutes")


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Programs:
    """Programs that listen on a port. `close()` ends them, and prints what they wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[Path, subprocess.Popen[bytes]] = {}

    def start(self, port: int, *command: str) -> subprocess.Popen[bytes]:
        """Returns when it listens."""
        log = self._folder / f"{port}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, preexec_fn=end_with_parent
            )
        self._started[log] = process

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()
            return listens(port)

        until(is_up, f"the start of {command[0]}")
        return process

    def close(self) -> None:
        for process in reversed(self._started.values()):
            process.terminate()
            process.wait(PATIENCE_SECONDS)
        for log in self._started:
            print(log.read_text(errors="replace"))


@dataclass
class Rig:
    """A server, and the workers with its layers."""

    client: httpx.Client
    server: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]
    empty_bytes: list[int]
    """What each worker took before it had a layer."""


@pytest.fixture(scope="module")
def rig(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    require_build(rpc_serve.BUILT, must_run=MUST_RUN)
    programs = Programs(tmp_path_factory.mktemp("rpc"))
    try:
        ports = [free_port() for _ in range(3)]
        workers = [
            programs.start(port, str(FOLDER / "bin" / "rpc-server"), "--port", str(port), "--threads", "1")
            for port in ports[:2]
        ]
        empty_bytes = [resident_bytes(worker) for worker in workers]
        endpoints = ",".join(f"127.0.0.1:{port}" for port in ports[:2])
        command = [sys.executable, str(SCALING / "rpc_serve.py"), "--workers", endpoints]
        command += ["--model", str(tiny_model_path), "--port", str(ports[2]), "--n_threads", "1"]
        server = programs.start(ports[2], *command)
        url = f"http://127.0.0.1:{ports[2]}"
        with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
            yield Rig(client, server, workers, empty_bytes)
    finally:
        programs.close()


def test_two_workers_share_a_model(rig: Rig, tiny_model_path: Path) -> None:
    answer = rig.client.post("/v1/chat/completions", json=QUESTION)
    assert answer.status_code == 200
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    third = tiny_model_path.stat().st_size // 3
    for worker, before in zip(rig.workers, rig.empty_bytes, strict=True):
        assert resident_bytes(worker) - before > third


def test_an_answer_is_streamed(rig: Rig) -> None:
    pieces = []
    with rig.client.stream("POST", "/v1/chat/completions", json={**QUESTION, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                pieces.append(delta.get("content") or "")
    assert "Paris" in "".join(pieces)
    assert sum(map(bool, pieces)) > 1


def test_without_a_worker_the_server_ends(rig: Rig) -> None:
    """The last test of the two workers: it ends one."""
    rig.workers[0].kill()
    rig.workers[0].wait(PATIENCE_SECONDS)
    with pytest.raises(httpx.TransportError):
        rig.client.post("/v1/chat/completions", json=QUESTION)
    assert rig.server.wait(PATIENCE_SECONDS) != 0


@pytest.mark.parametrize("endpoint", ["", "host", "host:", "host:port", ":50052", "host:65536"])
def test_an_endpoint_without_host_or_port_is_refused(endpoint: str) -> None:
    with pytest.raises(RpcError, match="write HOST:PORT"):
        check_worker(endpoint)


@pytest.mark.parametrize("endpoint", ["[::1]:8250", "::1:8250"])
def test_an_ipv6_address_is_refused_and_what_works_is_named(endpoint: str) -> None:
    with pytest.raises(RpcError, match=r"is an IPv6 address.*; write an IPv4 address, or a name"):
        check_worker(endpoint)


def test_a_name_is_looked_for_at_its_ipv4_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp would find nobody there, and end the process."""
    asked: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(address)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    check_worker("localhost:8250")
    assert asked == [("127.0.0.1", 8250)]


def test_a_host_that_is_no_name_is_an_error_of_one_line() -> None:
    with pytest.raises(RpcError, match=r"no rpc-server at x\.\.y:8250: "):
        check_worker("x..y:8250")


def test_a_worker_that_is_not_there_is_named() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(RpcError, match=rf"no rpc-server at {endpoint}: .* start it there"):
        check_worker(endpoint)


def test_a_build_that_is_missing_or_of_another_release_is_refused(tmp_path: Path) -> None:
    built = tmp_path / "built.txt"
    with pytest.raises(RpcError, match=r"no build with RPC; run .*rpc_build\.py"):
        check_build(built)
    built.write_text("0.0.1-abcdef123")
    with pytest.raises(RpcError, match=r"of llama\.cpp 0\.0\.1-abcdef123, not .*; run .*rpc_build\.py"):
        check_build(built)


def test_libraries_that_cannot_be_loaded_are_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rpc_serve, "FOLDER", tmp_path)
    monkeypatch.setattr(rpc_serve, "check_build", lambda: None)
    monkeypatch.setattr(rpc_serve, "check_worker", lambda endpoint: None)
    monkeypatch.setattr(sys, "argv", ["rpc_serve.py", "--workers", "host:50052"])
    assert rpc_serve.main() == 1
    assert capsys.readouterr().err.startswith(f"rpc_serve: error: {tmp_path}/bin/libggml-rpc.so: ")


def test_where_the_build_must_be_there_its_absence_is_no_skip(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception):
        require_build(tmp_path / "built.txt", must_run=False)
    with pytest.raises(pytest.fail.Exception):
        require_build(tmp_path / "built.txt", must_run=True)
