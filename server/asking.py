"""What the endpoints share that put questions to the engine instead of generating: tokens, templates,
embeddings.

A question needs no place in `admission.Admission`, since the engine answers it beside a generation or between
two, but any number may not wait either: their texts take memory.

Requests are served one at a time, in the order of arrival. What waits has not been sent to the engine, so a
client that leaves takes it along; and of long answers only one is being put together. While the engine
restarts all of them wait, as generations do.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from s2moe.engine.messages import Detokenized, Embedded, Query, QueryReply, Rendered, Tokenized
from s2moe.server.admission import Admission
from s2moe.server.disconnect import until_gone
from s2moe.server.engine_client import EngineClient, EngineError
from s2moe.server.errors import (
    AnswerTimeoutError,
    ApiError,
    QueueFullError,
    ServerError,
    draining,
    to_api_error,
)
from s2moe.server.metrics import REJECTION_REASONS, Metrics
from s2moe.server.service_time import ServiceTime

T = TypeVar("T")
Reply = TypeVar("Reply", Tokenized, Detokenized, Rendered, Embedded)


class Asking:
    """Puts questions of some kind; at most `capacity` requests wait behind the one that is answered."""

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        admission: Admission,
        *,
        capacity: int,
        timeout_seconds: float = 0,
    ) -> None:
        """`timeout_seconds`: that a request may take, its wait included; 0 = any time."""
        self._client = client
        self._metrics = metrics
        self._admission = admission
        self._capacity = capacity
        self._timeout_seconds = timeout_seconds
        self._n_open = 0
        self._turn = asyncio.Lock()
        self._service = ServiceTime()

    async def ask(self, request: Request, query: Query, kind: type[Reply]) -> Reply:
        """The reply to the only question of a request, of which nobody else keeps accounts. Raises what
        attend() and reply() raise."""
        try:
            return await self.attend(request, self.reply(query, kind))
        except (ApiError, EngineError) as error:
            if (code := to_api_error(error).code) in REJECTION_REASONS:
                self._metrics.requests_rejected.labels(code).inc()
            raise

    async def attend(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, which calls reply() as often as it needs to, in one place of the queue.

        Raises ApiError when the request is turned away or takes too long, ClientGoneError when its client
        leaves meanwhile.
        """
        try:
            self._check()
        except BaseException:
            work.close()
            raise
        self._n_open += 1
        try:
            patience = self._timeout_seconds or None
            return await until_gone(request.receive, self._in_turn(work), timeout_seconds=patience)
        except TimeoutError:
            raise AnswerTimeoutError(self._timeout_seconds) from None
        finally:
            work.close()  # if it was never its turn
            self._n_open -= 1

    async def reply(self, query: Query, kind: type[Reply]) -> Reply:
        """The reply to `query`, which is of type `kind`. Raises what EngineClient.ask() raises."""
        reply: QueryReply = await self._client.ask(query)
        if not isinstance(reply, kind):
            message = f"The engine answered {type(query).__name__} with {type(reply).__name__}."
            raise ServerError(message, code="engine_error")
        return reply

    async def _in_turn(self, work: Coroutine[Any, Any, T]) -> T:
        with self._admission.query() as begin:
            patience = self._admission.patience()
            async with self._turn:
                await self._admission.until_answering(patience)
                begin()
                began = time.monotonic()
                try:
                    return await work
                finally:
                    self._service.measure(time.monotonic() - began)

    def _check(self) -> None:
        if self._admission.draining:
            raise draining()
        if self._n_open > self._capacity:
            raise QueueFullError(self._capacity, self._service.retry_after_seconds())


def new_query_id() -> str:
    return uuid.uuid4().hex
