"""What only a GPU can show: native/tests/cuda_*_test.cpp, if `make cuda` built them and a GPU answers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gguf_factory import WeightType, write_random_model

PROGRAMS = Path(__file__).parents[2] / "build" / "native" / "s2moe" / "bin"
SKIPPED = 77
CASES: tuple[tuple[str, WeightType], ...] = (
    ("cuda_gate_test", "F16"),  # reads no model
    ("cuda_slots_test", "Q4_0"),
    ("cuda_slots_test", "BF16"),
)
"""Program and type of the model's weights: ggml has other kernels for quantized ones."""


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
    print(result.stdout)  # differences that were measured: pytest -rP shows them
    return result


@pytest.fixture
def model(weights: WeightType, tmp_path: Path) -> Path:
    path = tmp_path / f"{weights}.gguf"
    write_random_model(path, "qwen3moe", weights=weights)
    return path


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_gpu_computes_as_the_cpu(name: str, model: Path) -> None:
    result = run(name, model)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("name", "weights"), CASES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_is_clean(name: str, tool: str, model: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer: it comes with the CUDA toolkit")
    result = run(name, model, sanitizer, "--tool", tool, "--error-exitcode", "1")
    assert result.returncode == 0, result.stdout + result.stderr
