"""Layers of one model on two local workers, with the build of deploy/scaling/rpc_build.py if there is one."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ports import free_port

SCALING = Path(__file__).resolve().parents[2] / "deploy" / "scaling"
sys.path.insert(0, str(SCALING))

from rpc_serve import FOLDER, RpcError, check_worker  # noqa: E402

RPC_SERVER = FOLDER / "bin" / "rpc-server"
START_SECONDS = 60


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096


def wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in reversed(processes):
        process.terminate()
        process.wait(20)


@pytest.mark.skipif(
    not RPC_SERVER.exists(), reason="no build with RPC, which takes minutes: deploy/scaling/rpc_build.py"
)
def test_two_workers_share_a_model(
    tiny_model_path: Path, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    def start(name: str, port: int, *command: str) -> subprocess.Popen[bytes]:
        log = tmp_path / name
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        started.append(process)
        wait_for(process, port, log)
        return process

    ports = [free_port(), free_port()]
    workers = [
        start(f"worker{port}", port, str(RPC_SERVER), "--port", str(port), "--threads", "1") for port in ports
    ]
    empty_bytes = [resident_bytes(worker) for worker in workers]
    port = free_port()
    endpoints = ",".join(f"127.0.0.1:{each}" for each in ports)
    command = [sys.executable, str(SCALING / "rpc_serve.py"), "--workers", endpoints]
    command += ["--model", str(tiny_model_path), "--port", str(port), "--n_threads", "1"]
    start("serve", port, *command)
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=question, timeout=120)
    assert answer.status_code == 200, (tmp_path / "serve").read_text()
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    third = tiny_model_path.stat().st_size // 3
    for worker, before in zip(workers, empty_bytes, strict=True):
        assert resident_bytes(worker) - before > third


@pytest.mark.parametrize("endpoint", ["", "host", "host:", "host:port", ":50052"])
def test_an_endpoint_without_host_or_port_is_refused(endpoint: str) -> None:
    with pytest.raises(RpcError, match="write HOST:PORT"):
        check_worker(endpoint)


def test_a_worker_that_is_not_there_is_named() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(RpcError, match=rf"no rpc-server at {endpoint}: .* start it there"):
        check_worker(endpoint)
