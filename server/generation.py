"""The generation of one HTTP request, from the queue to its last event, in a task of its own.

Why a task: the HTTP side of a request may be cancelled at any moment and more than once (client gone,
server shutdown), while the engine's abort must be seen through before the next request may run. The task
is cancelled by nobody but `cancel()`, and by that only once, so its cleanup cannot be lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from s2moe.engine.messages import Failed, Finished, Generate, GenerationEvent, Step
from s2moe.server.admission import Admission
from s2moe.server.engine_client import EngineClient, EngineUnavailableError
from s2moe.server.errors import (
    AnswerTimeoutError,
    ApiError,
    ServerError,
    draining,
    from_failed,
    shut_down,
    to_api_error,
)
from s2moe.server.recorder import RequestRecorder

_ENGINE_TRIES = 3
_log = logging.getLogger(__name__)


class Generation:
    """Runs the engine's requests of one HTTP request, one after the other, and hands their events to one
    consumer through `next_event`.

    The consumer must call `cancel` when it stops before the last event; at any other time `cancel` does
    nothing. Events wait in memory for a slow consumer; the context length bounds their number.
    """

    def __init__(
        self,
        client: EngineClient,
        admission: Admission,
        recorder: RequestRecorder,
        requests: Sequence[Generate],
        *,
        timeout_seconds: float = 0,
    ) -> None:
        """`timeout_seconds`: that all requests together may hold the engine; 0 = any time."""
        self._client = client
        self._admission = admission
        self._requests = tuple(requests)
        self._timeout_seconds = timeout_seconds
        self.recorder = recorder
        self._events: deque[GenerationEvent | ApiError] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._cancel_cause: str | None = None
        self._cancelled_at = 0.0
        self._last: GenerationEvent | None = None
        self._direct: Callable[[Step], bool] | None = None
        self._end_slot: Callable[[], None] | None = None
        """While the engine is held: tells the queue that it is about to be free."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name=self._requests[0].request_id)
        self._task.add_done_callback(self._on_done)

    async def next_event(self) -> GenerationEvent:
        """The next event, up to and including Finished, for each request. Raises the ApiError that ended
        them.

        May be cancelled and called again without losing an event.
        """
        while not self._events:
            self._arrival = self._loop.create_future()
            await self._arrival
        event = self._events.popleft()
        if isinstance(event, ApiError):
            raise event
        return event

    def send_directly(self, direct: Callable[[Step], bool]) -> None:
        """While the consumer waits in `next_event`, offers each Step to `direct` first, straight from the
        socket; what it takes (True) does not come out of `next_event`. That saves a task switch per token."""
        self._direct = direct

    def cancel(self, cause: str) -> None:
        """Stops the request wherever it is: disconnect, shutdown or timeout. Returns at once; the engine's
        slot is freed when the engine is idle again."""
        if self._cancel_cause is None and not self._task.done():
            self._cancel_cause = cause
            self._cancelled_at = time.monotonic()
            if self._end_slot is not None:
                self._end_slot()
            self._task.cancel()

    def cut(self) -> None:
        """Ends the request because the server shuts down, with an error for the consumer."""
        if self._cancel_cause is None and not self._task.done():
            began = self.recorder.generation_began
            self._deliver(
                shut_down(generation_began=began) if self.recorder.phase != "queued" else draining()
            )
            self.cancel("shutdown")

    def fail(self, error: ApiError) -> None:
        """Ends the request because its answer cannot be written, with `error` for the consumer. It counts as
        a failure also where the engine is through with it."""
        if self._cancel_cause is None:
            self.recorder.not_written(error)
            self._deliver(error)
            self.cancel("disconnect")  # for the accounts it has failed already

    def _time_out(self) -> None:
        if self._cancel_cause is None and not self._task.done():
            self._deliver(AnswerTimeoutError(self._timeout_seconds))
            self.cancel("timeout")

    async def _run(self) -> None:
        async with self._admission.slot(self.cut) as self._end_slot:
            self.recorder.admitted()
            timer = (
                self._loop.call_later(self._timeout_seconds, self._time_out)
                if self._timeout_seconds
                else None
            )
            try:
                for index, request in enumerate(self._requests):
                    self.recorder.begin_choice(is_last=index == len(self._requests) - 1)
                    await self._try_to_generate(request)
            finally:
                if timer is not None:
                    timer.cancel()

    async def _try_to_generate(self, request: Generate) -> None:
        self._last = None
        for _ in range(_ENGINE_TRIES - 1):
            try:
                return await self._generate(request)
            except EngineUnavailableError:
                # The engine died between its being ready and our request: nothing was begun.
                if self._admission.draining:
                    raise
            await self._client.wait_ready()
        return await self._generate(request)

    async def _generate(self, request: Generate) -> None:
        await self._client.run(request, self._on_event)
        if isinstance(self._last, Failed):
            raise from_failed(self._last, generation_began=self.recorder.generation_began)
        if self._last is not None and _is_cancelled(self._last):
            raise ServerError(
                "The engine cancelled the request.",
                code="cancelled",
                generation_began=self.recorder.generation_began,
            )

    def _on_event(self, event: GenerationEvent) -> None:
        """Called from the socket, once per token: the consumer comes first, the accounts after it."""
        if isinstance(event, Step):
            # Only past a consumer that waits: one that is still busy has something older to send.
            waits = self._arrival is not None and not self._arrival.done()
            if self._direct is None or not waits or self._events or not self._direct(event):
                self._deliver(event)
        else:
            if isinstance(event, Finished | Failed):
                self._last = event
            if not isinstance(event, Failed) and not _is_cancelled(event):
                self._deliver(event)
        self._loop.call_soon(self.recorder.on_event, event)

    def _deliver(self, event: GenerationEvent | ApiError) -> None:
        self._events.append(event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        # A callback, because a task that is cancelled before its first step runs no `finally`.
        if task.cancelled():
            self.recorder.cancelled(self._cancel_cause or "shutdown", time.monotonic() - self._cancelled_at)
            return
        error = task.exception()
        if error is None:
            return
        api_error = to_api_error(error)
        if not isinstance(error, ApiError) and api_error.code == "internal_error":
            _log.error(
                "generation failed", exc_info=error, extra={"fields": {"id": self._requests[0].request_id}}
            )
        self.recorder.failed(api_error)
        self._deliver(api_error)


def _is_cancelled(event: GenerationEvent) -> bool:
    return isinstance(event, Finished) and event.reason == "cancelled"
