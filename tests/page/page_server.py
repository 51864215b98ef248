"""The real server in a thread of its own, since the driver of a browser blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from fake_engine import FakeEngine
from server_rig import ServerRig

from s2moe.server.settings import Settings


class PageServer:
    """A context manager. What belongs to the server's event loop is touched through `do`."""

    def __init__(self, engine: FakeEngine, **settings: Any) -> None:
        self.engine = engine
        self.rig = ServerRig(engine, Settings(**settings))
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="page server")

    @property
    def url(self) -> str:
        return self.rig.url

    def do(self, action: Callable[[], None]) -> None:
        """Runs `action` on the event loop and waits for its end."""

        async def run() -> None:
            action()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=5)

    def n_requests(self, route: str, code: str = "200", method: str = "GET") -> int:
        """HTTP requests of a route so far."""
        return int(self.rig.metrics.http_requests.labels(route, method, code)._value.get())

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=10)

    def __enter__(self) -> PageServer:
        self._thread.start()
        assert self._ready.wait(timeout=10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        # a Runner also ends what libraries have left running on the loop
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.rig.metrics.on_state(self.engine.state)
        async with self.rig.running():
            self._ready.set()
            await self._stop.wait()
