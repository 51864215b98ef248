"""The server of server_rig.py in a thread of its own, for tests that are not coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_engine import FakeEngine
from server_rig import ServerRig

from s2moe.server.settings import Settings


@contextmanager
def threaded_server(engine: FakeEngine, **settings: Any) -> Iterator[ServerRig]:
    """A running server. `engine.script` may be changed between requests; `rig.http` belongs to the thread."""
    running: list[tuple[ServerRig, asyncio.AbstractEventLoop, asyncio.Event]] = []
    is_up = threading.Event()

    async def serve() -> None:
        async with ServerRig(engine, Settings(**settings)).running() as rig:
            stop = asyncio.Event()
            running.append((rig, asyncio.get_running_loop(), stop))
            is_up.set()
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            is_up.set()

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    is_up.wait(10)
    assert running, "the server did not start; its thread's traceback is above"
    rig, loop, stop = running[0]
    try:
        yield rig
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
