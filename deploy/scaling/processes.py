"""Ports of this machine, and processes that do not outlive the program that started them."""

from __future__ import annotations

import ctypes
import signal
import socket

MAX_PORT = 65535
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def free_ports(n: int) -> list[int]:
    """Of 127.0.0.1; nobody listens on them at the moment."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def listens(port: int) -> bool:
    """Whether somebody does on 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def end_with_parent() -> None:
    """Popen's `preexec_fn`: the child gets SIGTERM when the thread that started it is gone, even if it was
    killed. nginx would outlive a closed terminal: at SIGHUP it reads its configuration anew."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
