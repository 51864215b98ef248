"""Calling an ASGI `send` from plain code, as long as it has nothing to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, cast

from starlette.types import Message, Send


class DirectSend:
    """Sends messages from the event loop's callbacks, without a task of one's own.

    uvicorn's `send` waits only while the client reads too slowly. Up to there it is run to its end on the
    spot; from there on a task finishes it, and until that has happened nothing more is taken.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._rest: asyncio.Task[None] | None = None

    @property
    def is_free(self) -> bool:
        """Whether the next message would not overtake one before."""
        return self._rest is None

    def __call__(self, message: Message) -> None:
        """Sends the message, or has begun to. Only while `is_free`."""
        coroutine = cast("Coroutine[Any, Any, None]", self._send(message))
        try:
            waits_for = coroutine.send(None)
        except StopIteration:
            return
        except Exception as error:
            # the caller is the engine's socket, which must not suffer for a client's
            self._rest = asyncio.get_running_loop().create_task(_fail(error))
            return
        self._rest = asyncio.get_running_loop().create_task(_finish(coroutine, waits_for))

    async def settled(self) -> None:
        """Returns when all that was sent directly has left. Raises what `send` raised."""
        if self._rest is not None:
            await self._rest
            self._rest = None

    def close(self) -> None:
        """Gives up what has not left yet."""
        if self._rest is not None:
            self._rest.cancel()


async def _fail(error: Exception) -> None:
    raise error


async def _finish(coroutine: Coroutine[Any, Any, None], waits_for: object) -> None:
    await _Continuation(coroutine, waits_for)


class _Continuation:
    """Awaits a coroutine that was already run up to its first suspension, at which it yielded `waits_for`."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: object) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                try:
                    value = yield waits_for
                except BaseException as error:
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(value)
            except StopIteration:
                return
