"""A server on a fake engine."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fake_engine import FakeEngine
from server_rig import ServerRig, StartServer

from s2moe.server.settings import Settings


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("S2MOE_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """The command line sends logs to a stderr that is closed after the test: every later line would fail."""
    names = ("", "uvicorn", "uvicorn.error", "sse_starlette", "asyncio")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root = logging.getLogger()
    root.handlers[:] = [each for each in root.handlers if type(each) is not logging.StreamHandler]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """Starts a server: `await start_server(FakeEngine(…), queue_size=2, …)`."""
    async with AsyncExitStack() as stack:

        async def start(engine: FakeEngine | None = None, **settings: Any) -> ServerRig:
            rig = ServerRig(engine or FakeEngine(), Settings(**settings))
            return await stack.enter_async_context(rig.running())

        yield start


@pytest.fixture
async def rig(start_server: StartServer) -> ServerRig:
    return await start_server()
