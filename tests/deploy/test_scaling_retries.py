"""Which requests nginx gives to a second server, with deploy/scaling/nginx.conf in front of stubs."""

from __future__ import annotations

import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import httpx
import pytest

from ports import free_port
from waiting import PATIENCE_SECONDS, until

SCALING = Path(__file__).resolve().parents[2] / "deploy" / "scaling"
sys.path.insert(0, str(SCALING))

from replicas import CONFIG, start_nginx, with_addresses  # noqa: E402

pytestmark = pytest.mark.skipif(
    shutil.which("nginx", path="/usr/sbin:/usr/bin") is None,
    reason="there is no nginx; on Debian: apt-get install nginx",
)
SECONDS = {"s": 1, "m": 60, "h": 3600}
Behaviour = Literal["answers", "is busy", "restarts", "leaves", "is silent"]
STATUSES: dict[Behaviour, int] = {"answers": 200, "is busy": 429, "restarts": 503}
"""Of those behaviours that have an answer."""


class Stub:
    """A server in place of s2moe, which notes what it is sent. A context manager."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.bodies: list[bytes] = []
        self._over = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                stub.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                if behaviour == "is silent":
                    stub._over.wait()
                if behaviour in STATUSES:
                    self.send_response(STATUSES[behaviour])
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Stub:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


class Gateway:
    """A client of nginx, and nginx's log."""

    def __init__(self, port: int, log: Path) -> None:
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS)
        self._log = log

    def post(self, *bodies: bytes) -> list[int]:
        """The statuses, in the order of the bodies. Of two idle servers each gets every other one."""
        return [self.client.post("/v1/chat/completions", content=body).status_code for body in bodies]

    def log(self) -> str:
        return self._log.read_text()

    def is_up(self) -> bool:
        """Without asking a server."""
        try:
            return self.client.get("/metrics").status_code == httpx.codes.NOT_FOUND
        except httpx.TransportError:
            return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    """nginx in front of these ports, here with another value of a setting:
    `start([8081, 8082], proxy_read_timeout="3s")`."""
    with ExitStack() as stack:

        def start(server_ports: list[int], **settings: str) -> Gateway:
            for parent in tmp_path.parents[:2]:
                parent.chmod(0o711)  # nginx's workers are another user where the tests run as root
            port = free_port()
            config = with_addresses(CONFIG.read_text(), port, server_ports)
            for name, value in settings.items():
                config, n_changed = re.subn(rf"\b{name} \w+;", f"{name} {value};", config)
                assert n_changed == 1, name
            log = tmp_path / "errors"
            process = start_nginx(tmp_path, config, stack.enter_context(log.open("wb")))
            stack.callback(process.wait, PATIENCE_SECONDS)
            stack.callback(process.terminate)
            gateway = Gateway(port, log)
            stack.callback(gateway.client.close)
            until(gateway.is_up, "the start of nginx")
            return gateway

        yield start


@contextmanager
def unreachable() -> Iterator[int]:
    """A port at which connections are neither accepted nor refused, as those of a machine that is off."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        port: int = full.getsockname()[1]
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.settimeout(1)
            try:
                client.connect(("127.0.0.1", port))
            except TimeoutError:
                yield port
                return
        pytest.skip("this system accepts connections to a full backlog")


def seconds_of(name: str) -> int:
    """The shipped value of a setting."""
    found = re.search(rf"\b{name} (\d+)([smh]);", CONFIG.read_text())
    assert found is not None, name
    return int(found[1]) * SECONDS[found[2]]


def test_a_server_that_cannot_be_reached_costs_its_request_nothing(start: Callable[..., Gateway]) -> None:
    with unreachable() as port, Stub("answers") as answering:
        gateway = start([port, answering.port])
        assert gateway.post(b"first", b"second") == [200, 200]
    assert "timed out" in gateway.log()
    assert answering.bodies == [b"first", b"second"]


@pytest.mark.parametrize("behaviour", ["is busy", "restarts", "leaves"])
def test_a_post_that_one_server_does_not_take_is_sent_to_the_other(
    start: Callable[..., Gateway], behaviour: Behaviour
) -> None:
    """`non_idempotent` says so."""
    with Stub(behaviour) as failing, Stub("answers") as answering:
        gateway = start([failing.port, answering.port])
        assert gateway.post(b"first", b"second") == [200, 200]
    assert failing.bodies
    assert answering.bodies == [b"first", b"second"]


def test_a_post_that_a_server_works_at_is_not_sent_to_the_other(start: Callable[..., Gateway]) -> None:
    """When proxy_read_timeout is over, so is the time for another try."""
    assert seconds_of("proxy_read_timeout") > seconds_of("proxy_next_upstream_timeout")
    with Stub("is silent") as silent, Stub("answers") as answering:
        ports = [silent.port, answering.port]
        gateway = start(ports, proxy_read_timeout="3s", proxy_next_upstream_timeout="2s")
        bodies = [b"first", b"second"]
        statuses = gateway.post(*bodies)
        assert sorted(statuses) == [200, 504]
        assert silent.bodies == [bodies[statuses.index(504)]]
        assert answering.bodies == [bodies[statuses.index(200)]]
    assert "timed out" in gateway.log()
