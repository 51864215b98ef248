"""Several s2moe servers behind nginx on this machine, to try deploy/scaling/nginx.conf.

    .venv/bin/python deploy/scaling/replicas.py [--port 8080] [--replicas 2] [SERVE-OPTION …]

Other options go to every `s2moe serve`. Ctrl-C stops all, running answers first, a second one at once; and so
does whatever else ends this program. It needs nginx 1.19.5 or newer (Debian: apt-get install nginx).
On one machine the servers share its cores and its memory, so this shows that it works, not what it gains.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from processes import MAX_PORT, end_with_parent, free_ports

CONFIG = Path(__file__).with_name("nginx.conf")
S2MOE = Path(sys.executable).with_name("s2moe")
START_SECONDS = 600
"""The first start builds the demo model."""
MAX_SERVERS = 64
STOP_SECONDS = 45
"""More than a server's --shutdown-timeout and, with --prompt-cache-dir, the writing of conversations."""
QUEUE_SIZE = 2
"""Requests that wait behind the running one: more are better off at another server."""

MAIN = """\
daemon off;
master_process on;
worker_processes 1;
pid "{folder}/nginx.pid";
error_log stderr warn;
events {{}}
http {{
    access_log off;
    client_body_temp_path "{folder}/body";
    proxy_temp_path "{folder}/proxy";
    fastcgi_temp_path "{folder}/fastcgi";
    uwsgi_temp_path "{folder}/uwsgi";
    scgi_temp_path "{folder}/scgi";
    include "{folder}/s2moe.conf";
}}
"""
"""What Debian's nginx.conf has around conf.d, in a folder that any user may write to."""


class ReplicasError(Exception):
    """One line for the person at the terminal."""


def with_addresses(config: str, port: int, server_ports: Sequence[int]) -> str:
    """nginx.conf for these addresses on the loopback interface. Raises ReplicasError."""
    servers = "".join(f"    server 127.0.0.1:{each} max_fails=0;\n" for each in server_ports)
    config, n_servers = re.subn(r"(?:^    server \S+ max_fails=0;\n)+", servers, config, flags=re.MULTILINE)
    config, n_listens = re.subn(r"listen \S+;", f"listen 127.0.0.1:{port};", config)
    if (n_servers, n_listens) != (1, 1):
        raise ReplicasError(f"{CONFIG} has no list of servers, or several `listen`")
    return config


def check_port(port: int) -> None:
    """nginx would try for seconds, while who has the port answers for it. Raises ReplicasError."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError) as error:
        raise ReplicasError(f"cannot listen on 127.0.0.1:{port}: {error}; choose another --port") from error


def start_nginx(folder: Path, config: str, log: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """nginx with a `config` such as nginx.conf beside this file. All that it writes is in `folder`, but its
    errors, which go to `log`, or where this process's go. Raises ReplicasError."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        raise ReplicasError("there is no nginx; on Debian: apt-get install nginx")
    (folder / "s2moe.conf").write_text(config)
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    if os.getuid() == 0:
        folder.chmod(0o711)  # nginx's workers are another user then
    command = [nginx, "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
    return start(command, log)


def start(command: Sequence[str], log: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """In a process group of its own, so that a terminal's Ctrl-C reaches this program alone: a server takes
    the second of two signals for "at once". Raises OSError."""
    return subprocess.Popen(command, stderr=log, process_group=0, preexec_fn=end_with_parent)


def start_server(port: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Raises ReplicasError."""
    command = [str(S2MOE), "serve", "--port", str(port), "--queue-size", str(QUEUE_SIZE), *options]
    try:
        return start(command)
    except OSError as error:
        raise ReplicasError(f"cannot start {S2MOE}: {error.strerror}; run make setup") from error


class Replicas:
    """The processes. `close()` stops them."""

    def __init__(self, folder: Path, port: int, n_servers: int, serve_options: Sequence[str]) -> None:
        """Returns at once. Raises ReplicasError; nothing runs then."""
        check_port(port)
        self.port = port
        self.server_ports = free_ports(n_servers)
        self.servers: list[subprocess.Popen[bytes]] = []
        self.nginx = start_nginx(folder, with_addresses(CONFIG.read_text(), port, self.server_ports))
        try:
            for each in self.server_ports:
                self.servers.append(start_server(each, serve_options))
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> None:
        """Until every server is. Raises ReplicasError."""
        deadline = time.monotonic() + START_SECONDS
        for port in (*self.server_ports, self.port):
            while not is_ready(port):
                if (ended := self.ended()) is not None:
                    raise ReplicasError(f"{ended} before all were ready")
                if time.monotonic() > deadline:
                    raise ReplicasError(f"nothing is ready on port {port} after {START_SECONDS} s")
                time.sleep(0.1)

    def ended(self) -> str | None:
        """Says which process has ended by itself, and how."""
        names = ("nginx", *(f"the server on port {port}" for port in self.server_ports))
        for name, process in zip(names, (self.nginx, *self.servers), strict=True):
            if (code := process.poll()) is not None:
                how = (
                    f"was killed by signal {-code}" if code < 0 else f"has ended with code {code}, see above,"
                )
                return f"{name} {how}"
        return None

    def close(self) -> None:
        """Lets running answers end, as long as the servers do."""
        if self.nginx.poll() is None:
            self.nginx.send_signal(signal.SIGQUIT)  # at SIGTERM it would cut them
        for server, port in zip(self.servers, self.server_ports, strict=False):
            if server.poll() is None and not is_draining(port):
                os.killpg(server.pid, signal.SIGTERM)  # also who builds the demo model for it
        deadline = time.monotonic() + STOP_SECONDS
        for process in (*self.servers, self.nginx):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            # whose first process was killed leaves others behind: nginx's workers would keep the port
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def is_ready(port: int) -> bool:
    return health(port)[0] == http.HTTPStatus.OK


def is_draining(port: int) -> bool:
    """Whether somebody else has told this server to stop."""
    return b'"draining"' in health(port)[1]


def health(port: int) -> tuple[int, bytes]:
    """Status and body; (0, empty) where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--port", type=int, default=8080, help="nginx's port on 127.0.0.1 (default 8080)")
    parser.add_argument("--replicas", type=int, default=2, help=f"servers, 1 to {MAX_SERVERS} (default 2)")
    arguments, serve_options = parser.parse_known_args()
    if not 1 <= arguments.replicas <= MAX_SERVERS:
        parser.error(f"--replicas: from 1 to {MAX_SERVERS}")
    if not 1 <= arguments.port <= MAX_PORT:
        parser.error(f"--port: from 1 to {MAX_PORT}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    replicas = None
    try:
        with tempfile.TemporaryDirectory(prefix="s2moe-replicas-") as folder:
            try:
                replicas = Replicas(Path(folder), arguments.port, arguments.replicas, serve_options)
                replicas.wait_ready()
                url = f"http://127.0.0.1:{replicas.port}"
                print(f"replicas: {url} in front of {replicas.server_ports}", flush=True)
                while (ended := replicas.ended()) is None:
                    time.sleep(1)
                raise ReplicasError(ended.rstrip(","))
            finally:
                if replicas is not None:
                    replicas.close()
    except ReplicasError as error:
        print(f"replicas: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
