"""One run of the engine process: the child, our end of its socket, and its stderr.

Knows how to start it, talk to it, notice its end and clean up after it; what its messages mean and whether
it is started again is the supervisor's business. All methods are called on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

from s2moe.engine.messages import FrameReader, FromEngine, ProtocolError, ToEngine, encode_frame
from s2moe.server.engine_exit import Condemnation

logger = logging.getLogger(__name__)
engine_logger = logging.getLogger("s2moe.engine")

STDERR_TAIL_LINES: Final = 50
_LEVELS: Final = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
"""The engine's own log lines begin with one of these."""
_NO_TROUBLE: Final = ("DEBUG", "INFO")
"""Lines of these levels do not explain an end."""
MAX_STDERR_LINE_BYTES: Final = 4096
_EOF_AFTER_EXIT_SECONDS: Final = 0.05
"""After the exit, bytes already sent (a Fatal, a last Step) are still read; a grandchild that holds the
socket open must not delay the notice for longer than this."""
_STDERR_AFTER_EXIT_SECONDS: Final = 0.2

MessageHandler = Callable[[FromEngine, int], None]
"""Takes a message and its size on the wire in bytes."""


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Ours, and what must be set before the engine starts, unless the operator has set it.

    GOMP_SPINCOUNT: a compute thread that waits for another sleeps after 400 turns, a few µs. By default
    it spins for milliseconds, and where another process wants the cores, or a thread waits for the drive, it
    takes that time from whoever has work.
    MALLOC_ARENA_MAX: each thread with a heap of its own would keep memory that experts could use.
    """
    ours = dict(environment)
    if "OMP_WAIT_POLICY" not in ours:
        ours.setdefault("GOMP_SPINCOUNT", "400")
    ours.setdefault("MALLOC_ARENA_MAX", "2")
    return ours


class EngineProcess:
    """Made by `spawn()`, then `connect()`; `lost` is set at its end; `reap()` must be called after that."""

    def __init__(
        self,
        child: asyncio.subprocess.Process,
        socket_: socket.socket,
        stderr_fd: int,
        on_message: MessageHandler,
    ) -> None:
        self.lost = asyncio.Event()
        """Set when the socket closed, the process exited or `condemn()` was called, whichever is first."""
        self.condemnation: Condemnation | None = None
        self.started_at = time.monotonic()
        self._child = child
        self._socket = socket_
        self._stderr_fd = stderr_fd
        self._wire = _Wire(self, on_message)
        self._stderr = _StderrForwarder(child.pid)
        self._exit_watch = asyncio.create_task(self._watch_exit())

    @classmethod
    async def spawn(cls, command: Sequence[str], on_message: MessageHandler) -> EngineProcess:
        """Starts `command` with `--fd N` appended. Raises OSError when it cannot be executed.

        The child gets a session of its own, so that a terminal's Ctrl-C reaches the front end alone, which
        then drains before it stops the engine. It must end itself when its socket reads EOF.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        stderr_read, stderr_write = os.pipe()
        try:
            child = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                # A plain pipe instead of subprocess.PIPE: asyncio's wait() would otherwise also wait for
                # the pipe's EOF, which a grandchild can hold back.
                stderr=stderr_write,
                stdout=stderr_write,  # native libraries print there; the front end's stdout stays clean
                env=engine_environment(os.environ),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(stderr_read)
            raise
        finally:
            theirs.close()
            os.close(stderr_write)
        return cls(child, ours, stderr_read, on_message)

    async def connect(self) -> None:
        """Begins to read; apart from `spawn()` so that its owner can know the process before it speaks."""
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(self._stderr_fd, "rb", buffering=0)
        await loop.connect_read_pipe(lambda: self._stderr, pipe)
        await loop.create_unix_connection(lambda: self._wire, sock=self._socket)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def stderr_tail(self) -> tuple[str, ...]:
        """The last lines that the engine wrote to stderr, oldest first, without its log of what went well."""
        return tuple(self._stderr.tail)

    def send(self, message: ToEngine) -> int:
        """Queues a message and returns its size in bytes; dropped (0) when the engine is gone.

        Raises ProtocolError when the message is too long for the wire.
        """
        frame = encode_frame(message)
        return len(frame) if self._wire.write(frame) else 0

    def condemn(self, reason: str, message: str) -> None:
        """Ends a process that cannot be trusted any more (SIGKILL). The first reason given is kept."""
        if self.condemnation is None and not self.lost.is_set():
            self.condemnation = Condemnation(reason, message)
        self.kill()
        self._wire.abort()
        self.lost.set()

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()

    async def reap(self, grace_seconds: float | None) -> int:
        """Waits for the exit, closes everything and returns the exit code (negative for a signal).

        A process that lost its socket but is still there after `grace_seconds` is killed (None: wait on,
        somebody else sees to its end).
        """
        exited, _ = await asyncio.wait([self._exit_watch], timeout=grace_seconds)
        if not exited:
            if self.condemnation is None:
                message = f"engine closed its connection but was still running after {grace_seconds:g} s"
                self.condemnation = Condemnation("crash", message)
            self.kill()
        returncode = await self._child.wait()
        await self._exit_watch
        self._wire.abort()
        await self._stderr.close(_STDERR_AFTER_EXIT_SECONDS)
        await self._wire.closed.wait()
        return returncode

    async def _watch_exit(self) -> None:
        await self._child.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EOF_AFTER_EXIT_SECONDS):
                await self._wire.closed.wait()
        self._wire.abort()
        self.lost.set()


class _Wire(asyncio.Protocol):
    """Our end of the socket. Reading is never paused: Pong and EOF must be seen whatever consumers do."""

    def __init__(self, process: EngineProcess, on_message: MessageHandler) -> None:
        self.closed = asyncio.Event()
        self._process = process
        self._on_message = on_message
        self._reader = FrameReader(from_engine=True)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        if self._process.lost.is_set():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            messages = cast("list[FromEngine]", self._reader.feed(data))
            for message, n_bytes in zip(messages, self._reader.frame_bytes, strict=True):
                if self._process.condemnation is not None:
                    return
                self._on_message(message, n_bytes)
        except ProtocolError as error:
            self._process.condemn("crash", f"engine broke the wire protocol: {error}")
        except Exception as error:
            logger.exception("handling a message of the engine failed")
            self._process.condemn("crash", f"handling a message of the engine failed: {error!r}")

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        self._process.lost.set()

    def write(self, frame: bytes) -> bool:
        if self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(frame)
        return True

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _StderrForwarder(asyncio.Protocol):
    """Logs the engine's stderr line by line and keeps its end."""

    def __init__(self, pid: int) -> None:
        self.tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        self._pid = pid
        self._partial = b""
        self._skipping = False
        """Inside a line that was already logged up to the length limit."""
        self._transport: asyncio.BaseTransport | None = None
        self._closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, rest = (self._partial + data).split(b"\n")
        for line in lines:
            if not self._skipping:
                self._emit(line)
            self._skipping = False
        if self._skipping:
            rest = b""
        elif len(rest) > MAX_STDERR_LINE_BYTES:
            self._emit(rest)
            self._skipping = True
            rest = b""
        self._partial = rest

    def connection_lost(self, error: Exception | None) -> None:
        if self._partial:
            self._emit(self._partial)
            self._partial = b""
        self._closed.set()

    def _emit(self, raw: bytes) -> None:
        text = raw[:MAX_STDERR_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if len(raw) > MAX_STDERR_LINE_BYTES:
            text += " … (line cut)"
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
        level, _, rest = text.partition(" ")
        if level not in _NO_TROUBLE:
            self.tail.append(text)
        if level in _LEVELS:
            engine_logger.log(_LEVELS[level], "%s", rest)
        else:
            engine_logger.info("%s", text)

    async def close(self, timeout_seconds: float) -> None:
        """Reads what is left, for at most `timeout_seconds`, then closes the pipe."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._closed.wait()
        if self._transport is not None:
            self._transport.close()
            await self._closed.wait()
