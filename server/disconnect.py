"""Noticing that a client left while its answer is not being written yet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from s2moe.server.errors import ClientGoneError

T = TypeVar("T")


async def until_gone(
    receive: Receive, work: Coroutine[Any, Any, T], *, timeout_seconds: float | None = None
) -> T:
    """Awaits `work`, whose request body has been read, and returns its result.

    Raises ClientGoneError when the client closes the connection first and TimeoutError after
    `timeout_seconds`; `work` is then cancelled, as it is when this call is cancelled.
    """
    loop = asyncio.get_running_loop()
    job = loop.create_task(work)
    watcher = loop.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((job, watcher), timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        # Not the returned set: the job may have ended in the very turn of the timeout, and what it took
        # from a queue would be lost.
        if job.done():
            return job.result()
        if watcher.done():
            watcher.result()
            raise ClientGoneError
        raise TimeoutError
    finally:
        job.cancel()
        watcher.cancel()
        await asyncio.gather(job, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
