"""Two real servers behind a real nginx with deploy/scaling/nginx.conf."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from ports import free_port
from waiting import PATIENCE_SECONDS, until

SCALING = Path(__file__).resolve().parents[2] / "deploy" / "scaling"
sys.path.insert(0, str(SCALING))

import replicas as replicas_module  # noqa: E402
from processes import listens  # noqa: E402
from replicas import CONFIG, QUEUE_SIZE, Replicas, ReplicasError, with_addresses  # noqa: E402

needs_nginx = pytest.mark.skipif(
    shutil.which("nginx", path="/usr/sbin:/usr/bin") is None,
    reason="there is no nginx; on Debian: apt-get install nginx",
)
LONG = {
    "messages": [{"role": "user", "content": "Tell a story."}],
    "max_tokens": 1500,
    "ignore_eos": True,
    "n": 16,
    "stream": True,
}
"""Minutes of work: it ends because its client leaves, never by itself while a test looks."""
SHORT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
CHAT = "/v1/chat/completions"


class Gateway:
    """A client of nginx, and of each server behind it."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{replicas.port}", timeout=PATIENCE_SECONDS)
        self.servers = [
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS)
            for port in replicas.server_ports
        ]

    def close(self) -> None:
        for client in (self.client, *self.servers):
            client.close()


def total(server: httpx.Client, name: str) -> float:
    """The sum of a metric's series."""
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def n_open(server: httpx.Client) -> float:
    """Requests that it has, running or waiting."""
    return total(server, "s2moe_requests_running") + total(server, "s2moe_requests_waiting")


@pytest.fixture(scope="module")
def replicas(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("replicas")
    for parent in folder.parents[:2]:
        parent.chmod(0o711)  # nginx's workers are another user where the tests run as root
    options = ["--model", str(tiny_model_path), "--ctx-size", "2048", "--threads", "1"]
    options += ["--memory-budget", "1GiB", "--no-keep-expert-counts"]
    replicas = Replicas(folder, free_port(), 2, options)
    try:
        replicas.wait_ready()
        yield replicas
    finally:
        replicas.close()


@pytest.fixture
def gateway(replicas: Replicas) -> Iterator[Gateway]:
    gateway = Gateway(replicas)
    yield gateway
    until(lambda: not any(map(n_open, gateway.servers)), "the end of all requests")
    gateway.close()


class Streams:
    """Long answers that are being read, each by a thread, until they are closed."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(self, client: httpx.Client, n: int) -> None:
        """Returns when the server has them all, running or waiting."""
        for _ in range(n):
            self._threads.append(threading.Thread(target=self._read, args=(client,)))
            self._threads[-1].start()
        until(lambda: n_open(client) == n, f"the arrival of {n} requests")

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _read(self, client: httpx.Client) -> None:
        with client.stream("POST", CHAT, json=LONG) as answer:
            for _ in answer.iter_lines():
                if self._stop.is_set():
                    return


@pytest.fixture
def streams() -> Iterator[Streams]:
    streams = Streams()
    yield streams
    streams.close()


@needs_nginx
def test_while_one_server_works_the_idle_one_gets_all_requests(gateway: Gateway) -> None:
    def running() -> list[float]:
        return [total(server, "s2moe_requests_running") for server in gateway.servers]

    with gateway.client.stream("POST", CHAT, json=LONG) as first:
        lines = first.iter_lines()  # closing it, as a collected generator does, would close the stream
        next(lines)
        until(lambda: sorted(running()) == [0, 1], "the start at one server")
        idle = gateway.servers[running().index(0)]
        before = total(idle, "s2moe_requests_total")
        for _ in range(3):
            assert gateway.client.post(CHAT, json=SHORT).status_code == 200
        until(lambda: total(idle, "s2moe_requests_total") == before + 3, "the idle server's count of them")
        until(lambda: sorted(running()) == [0, 1], "the end of these alone")


@needs_nginx
def test_tokens_arrive_while_the_answer_is_made(gateway: Gateway) -> None:
    with gateway.client.stream("POST", CHAT, json=LONG) as answer:
        lines = (line for line in answer.iter_lines() if '"content":"' in line and '"content":""' not in line)
        next(lines)
        assert sum(total(server, "s2moe_requests_running") for server in gateway.servers) == 1
        next(lines)


@needs_nginx
def test_a_client_that_leaves_ends_its_answer(gateway: Gateway) -> None:
    def cancelled() -> float:
        return sum(total(server, "s2moe_request_cancellations_total") for server in gateway.servers)

    before = cancelled()
    with gateway.client.stream("POST", CHAT, json=LONG) as answer:
        next(answer.iter_lines())
    until(lambda: cancelled() > before, "the cancellation")


@needs_nginx
def test_what_a_full_server_refuses_the_other_one_answers(gateway: Gateway, streams: Streams) -> None:
    full, free = gateway.servers
    streams.open(full, 1 + QUEUE_SIZE)
    assert full.post(CHAT, json=SHORT).status_code == 429
    for _ in range(4):  # nginx does not see what came past it, and asks the full one in turn
        assert gateway.client.post(CHAT, json=SHORT).status_code == 200
    assert total(full, "s2moe_requests_rejected_total") > 1
    streams.open(free, 1 + QUEUE_SIZE)
    refused = gateway.client.post(CHAT, json=SHORT)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "queue_full"


@needs_nginx
def test_metrics_are_those_of_one_server_and_not_served(gateway: Gateway) -> None:
    assert gateway.client.get("/metrics").status_code == 404
    assert gateway.client.get("/health").status_code == 200


@needs_nginx
def test_without_one_server_the_other_answers_everything(gateway: Gateway) -> None:
    """The last test of the two servers: it ends one."""
    gateway.replicas.servers[0].terminate()
    gateway.replicas.servers[0].wait(PATIENCE_SECONDS)
    assert "server on port" in (gateway.replicas.ended() or "")
    for _ in range(4):
        assert gateway.client.get("/health").status_code == 200
        assert gateway.client.post(CHAT, json=SHORT).status_code == 200
    gateway.servers.pop(0).close()


def test_addresses_replace_those_of_the_file() -> None:
    config = with_addresses(CONFIG.read_text(), 9000, [9001, 9002, 9003])
    assert "listen 127.0.0.1:9000;" in config
    assert [line.split()[1] for line in config.splitlines() if line.startswith("    server ")] == [
        "127.0.0.1:9001",
        "127.0.0.1:9002",
        "127.0.0.1:9003",
    ]


def test_a_file_without_a_list_of_servers_is_an_error() -> None:
    with pytest.raises(ReplicasError, match="no list of servers"):
        with_addresses("upstream s2moe {}", 9000, [9001])


def test_without_nginx_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(shutil, "which", nowhere)
    with pytest.raises(ReplicasError, match="apt-get install nginx"):
        Replicas(tmp_path, 9000, 2, [])


@needs_nginx
def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ReplicasError, match=f"cannot listen on 127.0.0.1:{port}: .*; choose another"):
            Replicas(tmp_path, port, 2, [])


@needs_nginx
def test_without_s2moe_nothing_runs_and_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def noted(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(start_nginx(*arguments))
        return started[0]

    start_nginx = replicas_module.start_nginx
    monkeypatch.setattr(replicas_module, "start_nginx", noted)
    monkeypatch.setattr(replicas_module, "S2MOE", tmp_path / "s2moe")
    with pytest.raises(ReplicasError, match=r"cannot start .*s2moe: No such file.*; run make setup"):
        Replicas(tmp_path, free_port(), 2, [])
    assert started[0].returncode is not None


STUB = """\
#!{python}
import pathlib, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port = int(sys.argv[sys.argv.index("--port") + 1])
signals = pathlib.Path(__file__).with_name(f"signals-{{port}}")
stopping, answering = threading.Event(), threading.Event()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        parts = [b"draining" if stopping.is_set() else b"ok"]
        if self.path == "/slow":
            answering.set()
            parts = [b"first", b"last"]
        self.send_response(200)
        self.send_header("Content-Length", str(2 + sum(map(len, parts))))
        self.end_headers()
        self.wfile.write(b'"' + parts[0])
        if self.path == "/slow":
            stopping.wait()
            time.sleep(1)
        self.wfile.write(b"".join(parts[1:]) + b'"')
        if self.path == "/slow":
            answering.clear()

def watch():
    while True:
        number = signal.sigwait(watched)
        with signals.open("a") as file:
            print(signal.Signals(number).name, file=file)
        stopping.set()

# a handler that sets an event may interrupt the wait for it, whose lock it needs
watched = (signal.SIGINT, signal.SIGTERM)
for number in watched:
    signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, watched)
threading.Thread(target=watch, daemon=True).start()
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
threading.Thread(target=server.serve_forever).start()
stopping.wait()
while answering.is_set():
    time.sleep(0.01)
server.shutdown()
"""
"""In place of s2moe. It writes down its signals; /slow is answered after the first of them."""
PROGRAM = """\
import pathlib, sys, replicas
replicas.S2MOE = pathlib.Path(sys.argv.pop(1))
sys.exit(replicas.main())
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    stub = tmp_path / "s2moe"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    return stub


def signals_of(stub: Path, port: int) -> list[str]:
    return stub.with_name(f"signals-{port}").read_text().split()


@needs_nginx
def test_ctrl_c_is_one_signal_to_each_server_and_lets_answers_end(stub: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, str(stub), "--port", str(free_port())]
    environment = {**os.environ, "PYTHONPATH": str(SCALING)}
    with subprocess.Popen(command, env=environment, preexec_fn=partial(os.login_tty, theirs)) as process:
        os.close(theirs)
        shown = ""
        while (ready := re.search(r":(\d+) in front of \[(\d+), (\d+)\]", shown)) is None:
            shown += os.read(ours, 4096).decode()
        port, *server_ports = map(int, ready.groups())
        with httpx.stream("GET", f"http://127.0.0.1:{port}/slow", timeout=PATIENCE_SECONDS) as answer:
            pieces = answer.iter_bytes()
            text = next(pieces)
            os.write(ours, b"\x03")
            assert text + b"".join(pieces) == b'"firstlast"'
        assert process.wait(PATIENCE_SECONDS) == 0
    os.close(ours)
    assert [signals_of(stub, each) for each in server_ports] == [["SIGTERM"]] * 2


@needs_nginx
def test_a_server_that_is_stopping_already_is_not_told_again(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_module, "S2MOE", stub)
    replicas = Replicas(tmp_path, free_port(), 2, [])
    try:
        replicas.wait_ready()
        port = replicas.server_ports[0]
        with httpx.stream("GET", f"http://127.0.0.1:{port}/slow", timeout=PATIENCE_SECONDS) as answer:
            next(answer.iter_bytes())
            replicas.servers[0].terminate()
            until(lambda: replicas_module.is_draining(port), "the beginning of its end")
            replicas.close()
    finally:
        replicas.close()
    assert [signals_of(stub, each) for each in replicas.server_ports] == [["SIGTERM"]] * 2


@needs_nginx
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_the_program_ends_nothing_is_left(number: signal.Signals, stub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder of temporary files"
    folder.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(stub), "--port", str(free_port())]
    environment = {**os.environ, "PYTHONPATH": str(SCALING), "TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        ports = [int(port) for port in re.findall(r"(?<=[: \[])\d{2,5}\b", line)]
        assert len(ports) == 3, line
        assert all(map(listens, ports))
        process.send_signal(number)
        killed = number == signal.SIGKILL
        assert process.wait(PATIENCE_SECONDS) == (-number if killed else 0)
    until(lambda: not any(map(listens, ports)), "the end of nginx and of both servers")
    assert killed or not list(folder.iterdir())


@needs_nginx
def test_a_killed_nginx_leaves_nothing_that_keeps_its_port(stub: Path, tmp_path: Path) -> None:
    """Its workers do not end with it."""
    port = free_port()
    replicas = Replicas(tmp_path, port, 1, [])
    try:
        replicas.wait_ready()
        until(lambda: listens(port), "nginx")
        replicas.nginx.kill()
        until(lambda: replicas.ended() is not None, "its end")
        assert replicas.ended() == "nginx was killed by signal 9"
        assert listens(port)
    finally:
        replicas.close()
    until(lambda: not listens(port), "the end of its workers")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--replicas", "0"),
        ("--replicas", "-1"),
        ("--replicas", "9" * 20),
        ("--port", "0"),
        ("--port", "65536"),
    ],
)
def test_numbers_out_of_range_are_named(
    flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["replicas.py", flag, value])
    with pytest.raises(SystemExit):
        replicas_module.main()
    assert f"{flag}: from 1 to" in capsys.readouterr().err
