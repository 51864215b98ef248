"""What only a GPU can show: native/tests/cuda_*_test.cpp, if `make cuda` built them and a GPU answers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "build" / "native" / "s2moe" / "bin"
SKIPPED = 77
KERNEL_TESTS = ("cuda_gate_test", "cuda_slots_test")


def run(name: str, model: Path, *wrapper: str) -> subprocess.CompletedProcess[str]:
    """Skips where there is no such program, or no GPU for it."""
    program = PROGRAMS / name
    if not program.exists():
        pytest.skip("this build has no CUDA: make cuda")
    # a kernel that waits for the host must not be in the way of another one's loading
    environment = {**os.environ, "S2MOE_TEST_MODEL": str(model), "CUDA_MODULE_LOADING": "EAGER"}
    command = [*wrapper, str(program)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode == SKIPPED:
        pytest.skip(result.stderr.strip())
    return result


@pytest.mark.parametrize("name", KERNEL_TESTS)
def test_gpu_computes_as_the_cpu(name: str, random_model: Callable[[str], Path]) -> None:
    result = run(name, random_model("qwen3moe"))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", KERNEL_TESTS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_is_clean(name: str, tool: str, random_model: Callable[[str], Path]) -> None:
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer: it comes with the CUDA toolkit")
    result = run(name, random_model("qwen3moe"), sanitizer, "--tool", tool, "--error-exitcode", "1")
    assert result.returncode == 0, result.stdout + result.stderr
