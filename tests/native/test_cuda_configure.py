"""The CUDA build configures for each chip and hands the choice on to ggml. Nothing is compiled here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="no nvcc: CMake cannot configure CUDA without a compiler"
)
@pytest.mark.parametrize("chip", ["87", "89", "90"])
def test_configures_for(chip: str, tmp_path: Path) -> None:
    cublas = tmp_path / "libcublas.so"  # configuring only needs the name of a file
    cublas.touch()
    command = ["cmake", "-S", str(REPOSITORY / "native"), "-B", str(tmp_path / "build")]
    command += ["-DS2MOE_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={chip}"]
    command += [f"-DS2MOE_LLAMA_DIR={REPOSITORY}/build/native/s2moe/source"]
    command += [f"-DCUDA_cublas_LIBRARY={cublas}", f"-DCUDA_cublasLt_LIBRARY={cublas}"]
    subprocess.run(command, check=True, capture_output=True)
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
    assert "GGML_CUDA:BOOL=ON" in cache
    commands = (tmp_path / "build" / "compile_commands.json").read_text()
    assert f"arch=compute_{chip},code=[compute_{chip},sm_{chip}]" in commands
    assert "ggml-cuda.cu" in commands
    assert "-compress-mode=size" not in commands, "drivers before CUDA 12.4 cannot load such kernels"
