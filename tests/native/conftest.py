"""Random models of each architecture, and libraries to compare with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_factory import write_random_model

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the random model of a variant at its first use."""
    folder = tmp_path_factory.mktemp("models")

    def path_of(variant: str) -> Path:
        path = folder / f"{variant}.gguf"
        if not path.exists():
            write_random_model(path, variant)
        return path

    return path_of


@pytest.fixture(scope="session")
def stock_library_dir() -> Path:
    """The unpatched libllama, built with the same flags (minutes at the first use)."""
    command = [sys.executable, "native/build.py", "--variant", "stock"]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return REPOSITORY / "build" / "native" / "stock" / "bin"
