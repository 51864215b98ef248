"""The request that the engine runs, as the front end keeps track of it."""

from __future__ import annotations

import asyncio

from s2moe.server.engine_client import EngineDiedError, EventSink


class RunningRequest:
    """One Generate that was sent, and who takes its events."""

    def __init__(self, request_id: str, sink: EventSink) -> None:
        self.request_id = request_id
        self.sink = sink
        self.began = False
        """A Step was seen."""
        self.aborting = False
        """Nobody wants the events any more."""
        self.error: EngineDiedError | None = None
        self.ended = asyncio.Event()
        """The engine has nothing more to do for it: Finished or Failed arrived, or the process is gone."""

    def fail(self, message: str) -> None:
        """The process is gone."""
        self.error = EngineDiedError(message, generation_began=self.began)
        self.ended.set()
