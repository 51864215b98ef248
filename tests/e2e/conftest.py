"""A server on the tiny demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_rig import ServeProcess


@pytest.fixture(scope="module")
def server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("serve") / "log"
    process = ServeProcess(log, "--model", str(tiny_model_path), "--alias", "demo", "--ctx-size", "4096")
    process.wait_ready()
    yield process
    process.close()
