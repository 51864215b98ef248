"""TCP ports for servers that tests start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One on 127.0.0.1 that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
