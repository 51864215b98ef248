"""How experts are read is chosen by what the system allows, and the choice can be asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fault_control import Faults, preload_environment

READER_CHOICE = Path(__file__).with_name("reader_choice.py")


def choose(model: Path, *arguments: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, str(READER_CHOICE), str(model), *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    choice: dict[str, Any] = json.loads(result.stdout)
    return choice


@pytest.fixture
def model(expert_model: Callable[[str], Path]) -> Path:
    return expert_model("q4_0")


def test_threads_where_io_uring_is_forbidden(model: Path) -> None:
    choice = choose(model, "auto", "direct", "io_uring")
    assert choice["reader"] == "threads"
    assert "io_uring" in choice["reason"]
    assert "not permitted" in choice["reason"]


def test_io_uring_that_is_demanded_and_forbidden_is_refused(model: Path) -> None:
    refusal = choose(model, "io_uring", "direct", "io_uring")
    assert refusal["status"] == "UNSUPPORTED"
    assert "--reader threads" in refusal["message"]


def test_io_uring_where_it_is_allowed(model: Path) -> None:
    choice = choose(model, "auto", "buffered")
    if choice["reader"] == "threads":
        pytest.skip(choice["reason"])
    assert (choice["reader"], choice["io"], choice["reason"]) == ("io_uring", "buffered", "")
    assert choose(model, "threads", "buffered")["reader"] == "threads"


def test_direct_reads_that_are_refused(model: Path, fault_shim: Path, tmp_path: Path) -> None:
    """As by a file system without O_DIRECT."""
    environment = preload_environment(fault_shim, tmp_path / "faults", Faults(refuse_direct=1))
    refusal = choose(model, "threads", "direct", environment=environment)
    assert refusal["status"] == "UNSUPPORTED"
    assert model.name in refusal["message"]
    assert "--io buffered" in refusal["message"]
    choice = choose(model, "threads", "buffered", environment=environment)
    assert (choice["io"], choice["reason"]) == ("buffered", "")
