"""A loaded engine for the tests of this folder."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_rig import Chat, EngineProcess

from s2moe.engine import messages as wire


@pytest.fixture
def spawn() -> Iterator[Callable[[], EngineProcess]]:
    """Starts engine processes and ends them after the test."""
    started: list[EngineProcess] = []

    def start() -> EngineProcess:
        started.append(EngineProcess(stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for engine in started:
        if engine.process.stderr is not None:
            engine.process.stderr.close()
        engine.close()


@pytest.fixture(scope="module")
def chat(tiny_model_path: Path) -> Iterator[Chat]:
    """A loaded engine on the tiny demo model, shared by a module's tests."""
    engine = EngineProcess()
    ready = engine.load(tiny_model_path, n_ctx=2048, n_batch=256)
    assert isinstance(ready, wire.Ready), ready
    yield Chat(engine)
    engine.close()
