"""A CUDA build as CMake configures it: what the library is told of it, and what it links with. Nothing is
compiled."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="no nvcc: CMake cannot configure CUDA without a compiler"
)


@pytest.fixture(scope="module")
def compilations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The words of each command, by the file's name."""
    folder = tmp_path_factory.mktemp("cuda")
    library = folder / "lib.so"  # configuring only needs the name of a file
    library.touch()
    command = ["cmake", "-S", str(REPOSITORY / "native"), "-B", str(folder / "build")]
    command += ["-DS2MOE_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=87;89-real;120"]
    command += [f"-DS2MOE_LLAMA_DIR={REPOSITORY}/build/native/s2moe/source"]
    # cuda_driver: the stub, so that there would be a driver to link with
    command += [f"-DCUDA_{name}_LIBRARY={library}" for name in ("cublas", "cublasLt", "cuda_driver")]
    subprocess.run(command, check=True, capture_output=True)
    commands = json.loads((folder / "build" / "compile_commands.json").read_text())
    return {Path(each["file"]).name: shlex.split(each["command"]) for each in commands}


def test_library_is_told_toolkit_and_architectures(compilations: dict[str, list[str]]) -> None:
    words = compilations["info.cpp"]
    assert "-DS2MOE_CUDA_ENABLED=1" in words
    # ggml compiles 120 as 120a
    assert '-DS2MOE_CUDA_ARCHITECTURES="87,89-real,120a"' in words
    (toolkit,) = (word for word in words if word.startswith("-DS2MOE_CUDA_TOOLKIT="))
    assert re.fullmatch(r'-DS2MOE_CUDA_TOOLKIT="[0-9]+\.[0-9]+[0-9.]*"', toolkit)


def test_libraries_do_not_link_with_the_driver(compilations: dict[str, list[str]]) -> None:
    """They must also serve on a CPU without one."""
    assert "-DGGML_CUDA_NO_VMM" in compilations["ggml-cuda.cu"]
