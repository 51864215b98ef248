"""A loaded engine for the tests of this folder."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_rig import Chat, EngineProcess
from fake_driver import build_driver
from gpu_rig import Start, engines_on_played_gpus

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


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA driver of any version, with any GPUs: see fake_driver.py."""
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def start(driver: Path) -> Iterator[Start]:
    """Starts engines whose GPUs the CPU plays."""
    with engines_on_played_gpus(driver) as start_one:
        yield start_one


@pytest.fixture(scope="module")
def chat(tiny_model_path: Path) -> Iterator[Chat]:
    """A loaded engine on the tiny demo model, shared by a module's tests."""
    engine = EngineProcess()
    ready = engine.load(tiny_model_path, n_ctx=2048, n_batch=256)
    assert isinstance(ready, wire.Ready), ready
    yield Chat(engine)
    engine.close()
