"""The engine's end of the socket."""

from __future__ import annotations

import socket
import threading

from s2moe.engine import messages as wire

RECEIVE_BYTES = 1 << 16


class Channel:
    """Messages to and from the front end. `send` may be called from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = wire.FrameReader(from_engine=False)
        self._send_lock = threading.Lock()

    def send(self, message: wire.FromEngine) -> None:
        frame = wire.encode_frame(message)
        with self._send_lock:
            self._socket.sendall(frame)

    def receive(self) -> list[wire.ToEngine | wire.FromEngine] | None:
        """Waits for bytes; returns the messages they complete, None at EOF."""
        data = self._socket.recv(RECEIVE_BYTES)
        return self._reader.feed(data) if data else None
