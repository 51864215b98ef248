"""What the front end knows of the engine: one interface, typed errors, no process and no socket.

`supervisor.EngineSupervisor` implements it with a real engine process; tests implement it with a
scripted fake.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from s2moe.engine.messages import (
    EngineStats,
    Failed,
    Finished,
    Generate,
    GenerationEvent,
    ModelInfo,
    Plan,
    Query,
    QueryFailed,
    QueryReply,
)


class EngineState(StrEnum):
    """Where the engine process is in its life. `restarting` covers the backoff wait and the new load."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    BUSY = "busy"
    RESTARTING = "restarting"
    DEAD = "dead"
    """Given up: the crash limit was reached or the configuration can never load."""


class EngineError(Exception):
    """Base of what `run` raises; `message` is fit for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EngineDiedError(EngineError):
    """The process ended while this request ran; the request is lost, the engine is being restarted."""

    def __init__(self, message: str, *, generation_began: bool) -> None:
        super().__init__(message)
        self.generation_began = generation_began


class EngineUnavailableError(EngineError):
    """There is no engine that could take a request now (`state` says why)."""

    def __init__(self, message: str, state: EngineState) -> None:
        super().__init__(message)
        self.state = state


class EngineStoppingError(EngineUnavailableError):
    """The server ends, and its engine with it."""


class TooLongForEngineError(EngineError):
    """A request, or a query, does not fit a message of the wire."""

    def __init__(self, message: str, limit_bytes: int) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes


class QueryError(EngineError):
    """The engine answered a query with QueryFailed."""

    def __init__(self, reply: QueryFailed) -> None:
        super().__init__(reply.message)
        self.reply = reply


class EngineObserver(Protocol):
    """Receives what the engine reports, whoever asked for it; called on the event loop, must not block."""

    def on_state(self, state: EngineState) -> None: ...

    def on_stats(self, stats: EngineStats) -> None: ...

    def on_finished(self, event: Finished | Failed) -> None:
        """A request has ended; also one whose events nobody wants any more."""
        ...

    def on_start_phase(self, phase: str, seconds: float) -> None:
        """`phase` is spawn or load."""
        ...

    def on_restart(self, reason: str) -> None:
        """`reason` is crash, oom, hang or manual."""
        ...

    def on_message(self, direction: str, n_bytes: int) -> None:
        """`direction` is to_engine or from_engine; one call per wire message."""
        ...


EventSink = Callable[[GenerationEvent], None]


class EngineClient(Protocol):
    """One engine. All methods are called on the event loop."""

    @property
    def state(self) -> EngineState: ...

    @property
    def state_detail(self) -> str:
        """A readable reason for the state, such as `loading model 42 %` or the last fatal error."""
        ...

    @property
    def model(self) -> ModelInfo | None:
        """The loaded model; stays known while the engine restarts; None before the first Ready."""
        ...

    @property
    def plan(self) -> Plan | None:
        """How the memory budget was divided at the last start; None also where nothing was planned."""
        ...

    @property
    def heartbeat_age_seconds(self) -> float:
        """Seconds since the engine last answered a ping; 0 before the first."""
        ...

    async def wait_ready(self) -> None:
        """Returns once the engine can take a request (at once when it can, including between requests).

        Waits through loading and restarts. Raises EngineUnavailableError when it never will.
        """
        ...

    async def wait_answering(self) -> None:
        """The same for a query, which the engine also takes beside a running request."""
        ...

    async def run(self, request: Generate, sink: EventSink) -> None:
        """Runs one request: hands each of its events to `sink` as it arrives, returns after the last one,
        which is Finished or Failed.

        `sink` is called on the event loop, straight from the socket, so that a token passes without a task
        switch of its own; it must not block or raise.

        At most one request runs at a time: the caller (`admission.Admission`) guarantees it. Cancelling
        the call aborts the request and returns only when the engine is idle again, so that the next
        request may follow at once; `sink` gets nothing more from then on.

        Raises EngineDiedError when the process ends before the last event, EngineUnavailableError
        when there is no ready engine, TooLongForEngineError.
        """
        ...

    async def ask(self, query: Query) -> QueryReply:
        """Sends a query and returns its reply, which is never QueryFailed. Any number may be under way, also
        beside a running request; the engine answers one after the other. Cancelling the call drops the
        reply.

        Raises QueryError, EngineDiedError when the process ends before the reply, EngineUnavailableError when
        there is no ready engine, TooLongForEngineError.
        """
        ...
