"""A small Hugging Face hub on loopback, and the content delivery network that it sends clients to.

It speaks the API as far as `s2moe pull` uses it: the listing of a repo with sizes and checksums, the redirect
of a large file to another host, and ranges there. Faults are set on the object and last until they are unset.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import json
import os
import random
import re
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

REPO = "acme/moe-GGUF"
MODEL = "moe-Q4_K_M.gguf"
COMMIT = "1234567890123456789012345678901234567890"


@dataclass(frozen=True)
class Refusal:
    """An error as the hub sends it."""

    status: int
    code: str = ""
    message: str = ""


@dataclass
class Seen:
    """One request that arrived. `host` is `hub` or `cdn`."""

    host: str
    path: str
    range: str | None
    token: str | None


@dataclass
class FakeHub:
    """`with FakeHub({"m.gguf": content}) as hub:` serves the files as REPO at hub.url."""

    files: dict[str, bytes]
    in_git: frozenset[str] = frozenset()
    """Files that are not in the large-file store: the hub gives no sha256 of them."""
    refuse_listing: Refusal | None = None
    refuse_file: Refusal | None = None
    listing: bytes | None = None
    """Sent in place of the JSON."""
    damaged: bool = False
    ignores_ranges: bool = False
    on_cdn: bytes | None = None
    """In place of every file that the hub lists."""
    shift_bytes: int = 0
    """Ranges begin that much later than was asked for."""
    part_bytes: int | None = None
    """At most so much comes of a range, properly said."""
    goes_on_for_bytes: int = 0
    """Answers are chunked, and so long, whatever was asked for."""
    cuts: list[int] = field(default_factory=list)
    """For each of the next downloads: where in the file the connection is closed."""
    resets: bool = False
    """Cuts are resets (RST), as of a firewall or a host that has crashed."""
    refused: int = 0
    """So many of the next downloads are sent to a port on which nobody listens."""
    failures: list[int] = field(default_factory=list)
    """Status of each of the next downloads."""
    retry_after: str = ""
    """Sent with failures."""
    page: bytes = b""
    """Sent with status 200 in place of a file, without its length, as by a portal that wants a login."""
    stall_after_bytes: int | None = None
    """Downloads stop there, without an end of the connection."""
    seen: list[Seen] = field(default_factory=list)

    def __enter__(self) -> FakeHub:
        self._over = threading.Event()
        self._hub = _serve(self._answer_hub)
        self._cdn = _serve(self._answer_cdn)
        self._deaf = socket.socket()  # bound and not listening: connections are refused
        self._deaf.bind(("127.0.0.1", 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._deaf.close()
        for server in (self._hub, self._cdn):
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._hub.server_address[1]}"

    @property
    def ranges(self) -> list[str | None]:
        """Of the downloads, in order."""
        return [each.range for each in self.seen if each.host == "cdn"]

    def _answer_hub(self, request: BaseHTTPRequestHandler) -> None:
        path = self._note("hub", request)
        if path == f"/api/models/{REPO}":
            if self.refuse_listing is not None:
                return _refuse(request, self.refuse_listing)
            return _send(request, 200, self.listing if self.listing is not None else self._listing())
        if self.refuse_file is not None:
            return _refuse(request, self.refuse_file)
        name = path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
        if name not in self.files:
            return _refuse(request, Refusal(404, "EntryNotFound", "Entry not found"))
        port = self._cdn.server_address[1]
        if self.refused:
            self.refused -= 1
            port = self._deaf.getsockname()[1]
        cdn = f"http://localhost:{port}/{request.path.rsplit(COMMIT + '/', 1)[1]}"
        return _send(request, 302, b"", {"Location": cdn, "X-Repo-Commit": COMMIT})

    def _answer_cdn(self, request: BaseHTTPRequestHandler) -> None:
        content = self.files[self._note("cdn", request).lstrip("/")]
        if self.failures:
            return _send(request, self.failures.pop(0), b"", {"Retry-After": self.retry_after})
        if self.page:
            request.send_response(200)
            request.send_header("Connection", "close")
            request.end_headers()
            request.wfile.write(self.page)
            return None
        content = content if self.on_cdn is None else self.on_cdn
        size = len(content)
        if self.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        first, last = 0, size - 1
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        ranged = wanted is not None and not self.ignores_ranges
        if wanted is not None and ranged:
            first, last = int(wanted[1]) + self.shift_bytes, min(int(wanted[2] or last), last)
            if first >= size:
                return _send(request, 416, b"", {"Content-Range": f"bytes */{size}"})
            last = min(last, first + (self.part_bytes or size) - 1)
        request.send_response(206 if ranged else 200)
        if ranged:
            request.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        if self.goes_on_for_bytes:
            request.send_header("Transfer-Encoding", "chunked")
            request.end_headers()
            body = content[first:].ljust(self.goes_on_for_bytes)
            request.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
            return None
        request.send_header("Content-Length", str(last + 1 - first))
        request.end_headers()
        cut = self.cuts.pop(0) if self.cuts else None
        end = min(last + 1, *(each for each in (cut, self.stall_after_bytes) if each is not None), size)
        request.wfile.write(content[first:end])
        if self.stall_after_bytes is not None and end == self.stall_after_bytes:
            self._over.wait()
        if end <= last:
            request.close_connection = True
            if self.resets:
                _reset(request.connection)
        return None

    def _note(self, host: str, request: BaseHTTPRequestHandler) -> str:
        path = unquote(urlsplit(request.path).path)
        headers = request.headers
        self.seen.append(Seen(host, path, headers.get("Range"), headers.get("Authorization")))
        return path

    def _listing(self) -> bytes:
        siblings = [self._sibling(name, content) for name, content in self.files.items()]
        return json.dumps({"_id": "1", "id": REPO, "sha": COMMIT, "siblings": siblings}).encode()

    def _sibling(self, name: str, content: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": "b" * 40}
        if name not in self.in_git:
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 135}
        return entry


def content_of(size_bytes: int, seed: int = 0) -> bytes:
    """As a GGUF file begins, and then anything."""
    return b"GGUF" + random.Random(seed).randbytes(size_bytes - 4)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may be gone before it has been answered in full."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def _serve(answer: Callable[[BaseHTTPRequestHandler], None]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                answer(self)
            except ConnectionError:
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


def _reset(connection: socket.socket) -> None:
    """Once all that was sent has arrived: a reset throws away the rest."""
    unsent = array.array("i", [1])
    deadline = time.monotonic() + 10
    while unsent[0] and time.monotonic() < deadline:
        fcntl.ioctl(connection, termios.TIOCOUTQ, unsent)
        time.sleep(0.005)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(connection.detach())  # at once, and without the FIN of http.server's own end


def _refuse(request: BaseHTTPRequestHandler, refusal: Refusal) -> None:
    headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
    _send(request, refusal.status, json.dumps({"error": refusal.message}).encode(), headers)


def _send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        if value:
            request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)
