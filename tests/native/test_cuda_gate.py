"""The gate's kernel on a GPU: native/tests/cuda_gate_test.cpp, if `make cuda` built it and a GPU answers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "build" / "native" / "s2moe" / "bin" / "cuda_gate_test"
SKIPPED = 77


def test_kernel_chooses_as_the_cpu() -> None:
    if not PROGRAM.exists():
        pytest.skip("this build has no CUDA: make cuda")
    result = subprocess.run([str(PROGRAM)], capture_output=True, text=True, check=False)
    if result.returncode == SKIPPED:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr
