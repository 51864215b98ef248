"""`make cuda-check` compiles what it says, shows what does not compile, and names what a toolkit lacks."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOLKIT = REPOSITORY / "native" / "cuda_toolkit.py"
sys.path.insert(0, str(TOOLKIT.parent))

import cuda_toolkit  # noqa: E402
from prepare import PrepareError  # noqa: E402

OURS = sorted(
    path.name for path in (REPOSITORY / "native" / "cuda").iterdir() if path.suffix in (".cu", ".cpp")
)
PATCHED = sorted(
    {
        Path(path).name
        for patch in (REPOSITORY / "native" / "patches").glob("*.patch")
        for path in re.findall(r"^\+\+\+ b/(ggml/src/ggml-cuda/\S+)$", patch.read_text(), re.MULTILINE)
    }
)
WITH_CUDA = sorted(
    path.name
    for folder in ("src", "tests")
    for path in (REPOSITORY / "native" / folder).rglob("*.cpp")
    if "S2MOE_CUDA_ENABLED" in path.read_text() or path.name.startswith(("cuda_gate", "cuda_slots"))
)
CHECKED = (*OURS, *PATCHED, *WITH_CUDA, "s2moe-cuda-op.cpp")
"""All of native/cuda, what patches touch or add in ggml-cuda, and what others have for CUDA only."""

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="no nvcc: `make cuda-check` would fetch one, a test does not"
)


def run_toolkit(
    *arguments: str, native: Path = TOOLKIT.parent, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(native / TOOLKIT.name), *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def compiled_sources(folder: Path, commands: str) -> set[str]:
    """Names of the files that a build compiled. It may have objects of what is not its any more."""
    sources = set()
    for each in json.loads(commands):
        output = re.search(r" -o (\S+)", each["command"])
        if output is not None and (Path(each["directory"]) / output[1]).exists():
            sources.add(Path(each["file"]).name)
    return sources


@needs_nvcc
@pytest.mark.timeout(1200)
def test_checked_files_compile_for_both_chips() -> None:
    result = run_toolkit("check")
    assert result.returncode == 0, result.stderr
    folder = REPOSITORY / "build" / "native" / "cuda-check"
    commands = (folder / "compile_commands.json").read_text()
    for chip in ("87", "89"):
        assert f"arch=compute_{chip},code=[sm_{chip}]" in commands
    assert {"gate.cu", "gate_op.cpp", "remap.cu", "ggml-cuda.cu"} <= set(CHECKED)
    assert {"gate.cpp", "api.cpp", "cuda_slots_test.cpp"} <= set(CHECKED)
    assert set(CHECKED) <= compiled_sources(folder, commands)


@needs_nvcc
def test_error_in_a_kernel_is_shown(tmp_path: Path) -> None:
    """In a copy of native/, whose build ends at the first file that does not compile."""
    native = tmp_path / "native"
    shutil.copytree(TOOLKIT.parent, native)
    kernel = native / "cuda" / "gate_rule.h"
    kernel.write_text(kernel.read_text().replace("lanes.meet();", "lanes.meat();", 1))
    prepared = REPOSITORY / "build" / "native" / "s2moe" / "source"
    folder = tmp_path / "build"
    result = run_toolkit(
        "check", "--folder", str(folder), "--define", f"S2MOE_LLAMA_DIR={prepared}", native=native
    )
    assert result.returncode == 1
    assert "meat" in result.stderr


def test_define_without_a_value_is_named() -> None:
    result = run_toolkit("check", "--define", "S2MOE_TESTS")
    assert result.returncode == 2
    assert "--define: write NAME=VALUE, not 'S2MOE_TESTS'" in result.stderr


def test_toolkit_that_cannot_run_is_named() -> None:
    line = last_line(run_toolkit("check", CUDACXX="/nonexistent/nvcc"))
    assert "CUDACXX is /nonexistent/nvcc" in line
    assert "unset it" in line


def test_toolkit_that_does_not_work_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\necho 'no cicc here' >&2\nexit 1\n")
    broken.chmod(0o755)
    line = last_line(run_toolkit("check", CUDACXX=str(broken)))
    assert "does not work: no cicc here" in line
    assert "CUDACXX" in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"#!/bin/sh\nprintf '\\377\\376garbage' >&2\n", "garbage"),
        (b'#!/bin/sh\necho "#$ TOP=$PWD" >&2\n[ $1 != --version ] || exit 3\n', "--version does not work"),
        (b"#!/nonexistent/interpreter\n", "cannot be run (No such file or directory)"),
        (b"no program at all\n", "cannot be run (Exec format error)"),
    ],
    ids=["garbage", "no version", "no interpreter", "no program"],
)
def test_nvcc_that_does_not_work_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    script = tmp_path / "nvcc"
    script.write_bytes(content)
    script.chmod(0o755)
    line = last_line(run_toolkit("check", CUDACXX=str(script)))
    assert words in line
    assert "name another nvcc in CUDACXX" in line


def test_nvcc_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvcc"
    script.write_text("#!/bin/sh\nexec sleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setattr(cuda_toolkit, "NVCC_SECONDS", 0.2)
    with pytest.raises(PrepareError, match=r"no answer within 0\.2 s"):
        cuda_toolkit.root_of(script)


def fake_nvcc(folder: Path, release: str) -> Path:
    """One that knows its folder and release, and nothing else."""
    script = folder / "nvcc"
    script.write_text(
        f"#!/bin/sh\necho '#$ TOP={folder}' >&2\necho 'Cuda compilation tools, release {release}, V'\n"
    )
    script.chmod(0o755)
    return script


def test_toolkit_that_is_too_old_is_named(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cublas_v2.h").touch()
    line = last_line(run_toolkit("check", CUDACXX=str(fake_nvcc(tmp_path, "11.5"))))
    assert "is of CUDA 11, and C++20 needs 12 or newer" in line
    assert "CUDACXX" in line


@pytest.mark.skipif(Path("/usr/include/cublas_v2.h").exists(), reason="this machine's cuBLAS is found")
def test_toolkit_without_cublas_that_cannot_be_completed_is_named(tmp_path: Path) -> None:
    line = last_line(run_toolkit("check", CUDACXX=str(fake_nvcc(tmp_path, "12.6"))))
    assert "CUDA 12 toolkit" in line
    assert "has no cuBLAS" in line
    assert "libcublas-dev-12" in line


@pytest.mark.skipif(Path("/usr/include/cublas_v2.h").exists(), reason="this machine's cuBLAS is found")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="wheels are pinned for x86-64 only")
def test_offline_names_the_remedy(tmp_path: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    cache = tmp_path / "cache"
    line = last_line(
        run_toolkit("check", CUDACXX=str(fake_nvcc(tmp_path, "13.0")), S2MOE_CACHE_DIR=str(cache), **offline)
    )
    assert "cannot download nvidia-cublas" in line
    assert "Check the network" in line
    assert not any(cache.rglob("*.whl"))
