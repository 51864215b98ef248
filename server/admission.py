"""The queue in front of the engine: one request runs, a bounded number waits, first in, first out.

When a request is taken in:

    draining (SIGTERM came)       503 draining; waiting requests get it too, they would be cut anyway
    the engine is dead            503 engine_dead
    the model was never loaded    503 loading; not queued, since a load may take minutes or fail
    the engine restarts           queued like at any other time: its load is known to work, and the client
                                  wants an answer more than an error
    the queue is full             429 queue_full

and when it has waited for longer than --queue-timeout: 429 queue_timeout.

A request that was cancelled holds the engine until the engine has let go of it. Until then one more than the
queue's length may wait: the one that comes next is as good as running.

A waiting request is in no way tied to the engine process, so it survives a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from s2moe.server.engine_client import EngineClient, EngineState
from s2moe.server.errors import QueueFullError, QueueTimeoutError, draining, shut_down, unavailable
from s2moe.server.metrics import Metrics
from s2moe.server.service_time import ServiceTime

_FIRST_SERVICE_GUESS_SECONDS = 5.0


class Admission:
    """Grants the engine to one request at a time. All methods are called on the event loop.

    Invariant: `_held` is true exactly while one caller is inside `slot()` past its wait, and a slot that
    is freed goes straight to the oldest waiter, so a newcomer never overtakes.
    """

    def __init__(
        self, client: EngineClient, metrics: Metrics, *, capacity: int, timeout_seconds: float = 0
    ) -> None:
        """`timeout_seconds`: that a request may wait for a ready engine; 0 = any time."""
        self._client = client
        self._metrics = metrics
        self._capacity = capacity
        self._timeout_seconds = timeout_seconds
        self._held = False
        self._held_is_running = False
        self._held_is_ending = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._cutters: set[Callable[[], None]] = set()
        self._queries: set[asyncio.Task[Any]] = set()
        self._unsent: set[asyncio.Task[Any]] = set()
        """Those of them that the engine does not know of yet."""
        self._service = ServiceTime(_FIRST_SERVICE_GUESS_SECONDS)
        self._run_began = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def n_waiting(self) -> int:
        holder_waits = self._held and not self._held_is_running and not self._held_is_ending
        return len(self._waiting) + holder_waits

    @property
    def n_running(self) -> int:
        """What the engine works on, or has been asked."""
        return self._held_is_running + len(self._queries) - len(self._unsent)

    def check(self) -> None:
        """Raises the ApiError with which a request would be turned away now."""
        if self.draining:
            raise draining()
        state = self._client.state
        if state is EngineState.DEAD:
            raise unavailable(state, self._client.state_detail)
        if self._client.model is None and state in (EngineState.STARTING, EngineState.LOADING):
            raise unavailable(state, self._client.state_detail)
        if self._held and self.n_waiting >= self._capacity + self._held_is_ending:
            raise QueueFullError(self._capacity, self.retry_after_seconds())

    @asynccontextmanager
    async def slot(self, cut: Callable[[], None]) -> AsyncIterator[Callable[[], None]]:
        """Waits in the queue, then holds the engine, which is ready, for the body of the `with`.

        `cut` is called when a shutdown runs out of patience; it must end the body soon. Whoever cancels the
        body calls what is yielded: from then on the slot is about to be free. Raises ApiError when the
        request is turned away or the queue is dissolved, EngineUnavailableError when the engine is given up.
        Cancelling the wait leaves the queue at once.
        """
        self.check()
        patience = self.patience()
        await self._in_time(self._acquire(), patience)
        self._cutters.add(cut)
        try:
            await self._in_time(self._client.wait_ready(), patience)
            if self.draining:
                raise draining()
            self._held_is_running = True
            self._run_began = time.monotonic()
            self._show()
            yield self._end
        finally:
            self._cutters.discard(cut)
            if self._held_is_running:
                # However it ended: those who wait have waited for that long.
                self._service.measure(time.monotonic() - self._run_began)
            self._held_is_running = False
            self._held_is_ending = False
            self._release()

    @contextmanager
    def query(self) -> Iterator[Callable[[], None]]:
        """Counts a query, which takes no place in the queue, until the body of the `with` ends, so that a
        shutdown waits for it, too. In a task of its own, which is cancelled when that runs out of patience.

        What is yielded is called once the query is being sent; up to there it ends as soon as the queue is
        drained. Raises ApiError when it is cut.
        """
        if self.draining:
            raise draining()
        task = asyncio.current_task()
        assert task is not None
        began = False

        def begin() -> None:
            nonlocal began
            began = True
            self._unsent.discard(task)

        self._queries.add(task)
        self._unsent.add(task)
        self._show()
        try:
            yield begin
        except asyncio.CancelledError:
            if not self.draining:
                raise
            raise (shut_down(generation_began=False) if began else draining()) from None
        finally:
            self._queries.discard(task)
            self._unsent.discard(task)
            self._show()

    def patience(self) -> float | None:
        """When a wait that begins now has taken too long, on the event loop's clock."""
        if not self._timeout_seconds:
            return None
        return asyncio.get_running_loop().time() + self._timeout_seconds

    async def until_answering(self, patience: float | None) -> None:
        """Waits while the engine restarts, for a query that is about to be sent. In any other state the query
        itself shows whether there is an engine. Raises what slot() raises."""
        if self._client.state is EngineState.RESTARTING:
            await self._in_time(self._client.wait_answering(), patience)

    def retry_after_seconds(self) -> int:
        """Until one place in the queue should be free: what is left of the running request, by the mean
        service time; at least 1."""
        elapsed = time.monotonic() - self._run_began if self._held_is_running else 0.0
        return self._service.retry_after_seconds(elapsed)

    def drain(self) -> None:
        """Turns away new and waiting requests from now on; the running one goes on."""
        self.draining = True
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(draining())
        if self._held and not self._held_is_running:
            self._cut_holder()
        for task in self._unsent:
            task.cancel()
        self._show()

    def cut(self) -> None:
        """Ends the request that holds the engine, and all queries."""
        self._cut_holder()
        for task in self._queries:
            task.cancel()

    def _cut_holder(self) -> None:
        for cutter in list(self._cutters):
            cutter()

    async def idle(self) -> None:
        """Returns when nothing runs or waits."""
        await self._idle.wait()

    def _end(self) -> None:
        self._held_is_ending = True

    async def _in_time(self, wait: Coroutine[Any, Any, None], patience: float | None) -> None:
        try:
            async with asyncio.timeout_at(patience):
                await wait
        except TimeoutError:
            raise QueueTimeoutError(self._timeout_seconds, self.retry_after_seconds()) from None

    async def _acquire(self) -> None:
        if not self._held:
            self._held = True
            self._show()
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._show()
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # The slot was handed over in the same turn in which this task was cancelled.
                self._release()
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            self._show()
            raise

    def _release(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break
        else:
            self._held = False
        self._show()

    def _show(self) -> None:
        self._metrics.requests_running.set(self._held_is_running)
        self._metrics.requests_waiting.set(self.n_waiting)
        if self._held or self._queries:
            self._idle.clear()
        else:
            self._idle.set()
