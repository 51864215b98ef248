"""What deploy/scaling/rpc_build.py tells CMake and the compiler, with stubs in place of CMake and CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCALING = Path(__file__).resolve().parents[2] / "deploy" / "scaling"
sys.path.insert(0, str(SCALING))

import rpc_build  # noqa: E402
from cuda_toolkit import Toolkit  # noqa: E402
from prepare import PrepareError  # noqa: E402

DEFINES = {"S2MOE_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "89"}


def stub(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the build."""
    folder = tmp_path / "rpc"
    monkeypatch.setattr(rpc_build, "FOLDER", folder)
    monkeypatch.setattr(rpc_build, "BUILT", folder / "built.txt")
    monkeypatch.setattr(rpc_build, "PYTHON_PACKAGES", folder / "python")
    return folder


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of one with cuBLAS, whose nvcc is not in PATH. It can say where and of what release it is."""
    root = tmp_path / "cuda"
    nvcc = stub(root / "bin" / "nvcc", f"echo '#$ TOP={root}' >&2; echo 'Cuda tools, release 12.6, V12.6'")
    for name in ("include/cublas_v2.h", "lib64/libcublas.so"):
        (root / name).parent.mkdir()
        (root / name).touch()
    monkeypatch.setenv("CUDACXX", str(nvcc))
    return root


def configured(folder: Path, defines: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """CMake's settings, from its command line, in a build that ends there."""
    out = folder.with_name("arguments.json")
    note = f"import json, sys; json.dump(sys.argv[1:], open('{out}', 'w'))"
    cmake = stub(folder.with_name("bin") / "cmake", f'\'{sys.executable}\' -c "{note}" "$@"; exit 1')
    monkeypatch.setenv("PATH", f"{cmake.parent}:{os.environ['PATH']}")
    with pytest.raises(PrepareError, match="cmake"):
        rpc_build.build_all(defines)
    words = [word.removeprefix("-D") for word in json.loads(out.read_text()) if word.startswith("-D")]
    return dict(word.split("=", 1) for word in words)


def test_without_cuda_no_toolkit_is_looked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDACXX", "/nonexistent/nvcc")
    settings = configured(folder, {}, monkeypatch)
    assert settings["GGML_RPC"] == "ON"
    assert settings["S2MOE_PATCHED"] == "OFF"
    assert not any("CUDA" in name for name in settings)


@pytest.mark.parametrize("value", ["ON", "on", "1", "TRUE"])
def test_cmake_is_told_where_the_toolkit_is(
    folder: Path, toolkit: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = configured(folder, {**DEFINES, "S2MOE_CUDA": value}, monkeypatch)
    assert settings["S2MOE_CUDA"] == value
    assert settings["GGML_RPC"] == "ON"
    assert settings["CMAKE_CUDA_ARCHITECTURES"] == "89"
    assert settings["CMAKE_CUDA_COMPILER"] == str(toolkit / "bin" / "nvcc")
    assert settings["CUDAToolkit_ROOT"] == str(toolkit)
    assert f"-Wl,-rpath,{toolkit}/lib64" in settings["CMAKE_SHARED_LINKER_FLAGS"].split()


def test_what_the_user_says_of_the_toolkit_counts(
    folder: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = configured(folder, {**DEFINES, "CMAKE_CUDA_COMPILER": "/elsewhere/nvcc"}, monkeypatch)
    assert settings["CMAKE_CUDA_COMPILER"] == "/elsewhere/nvcc"


def test_cublas_from_a_wheel_is_found_by_the_compiler_and_by_the_libraries(tmp_path: Path) -> None:
    """native/CMakeLists.txt sees to the linker."""
    for name in ("cuda/lib64", "cublas/lib64"):
        (tmp_path / name).mkdir(parents=True)
    cublas = tmp_path / "cublas"
    settings = rpc_build.settings(Toolkit(tmp_path / "cuda/bin/nvcc", tmp_path / "cuda", cublas))
    assert settings["S2MOE_CUBLAS_DIR"] == str(cublas)
    assert settings["CMAKE_CUDA_FLAGS"] == f"-isystem {cublas}/include"
    rpaths = [f"-Wl,-rpath,{tmp_path}/{name}/lib64" for name in ("cuda", "cublas")]
    assert settings["CMAKE_SHARED_LINKER_FLAGS"].split() == rpaths


def test_a_toolkit_that_cannot_run_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDACXX", "/nonexistent/nvcc")
    monkeypatch.setattr(sys, "argv", ["rpc_build.py", "--define", "S2MOE_CUDA=ON"])
    assert rpc_build.main() == 1
    assert "CUDACXX is /nonexistent/nvcc" in capfd.readouterr().err


def compile_library(path: Path, code: str, *options: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["c++", "-x", "c++", "-", "-x", "none", "-shared", "-fPIC", *options, "-o", str(path)]
    subprocess.run(command, input=code, text=True, check=True)


def test_the_worker_links_with_libraries_that_need_those_of_cuda(folder: Path, tmp_path: Path) -> None:
    """Which are not where the linker looks by itself."""
    libraries, cuda = folder / "bin", tmp_path / "cuda" / "lib64"
    compile_library(cuda / "libcublas.so.13", "int multiply() { return 7; }", "-Wl,-soname,libcublas.so.13")
    needs_cublas = "int multiply(); int compute() { return multiply(); }"
    compile_library(libraries / "libggml-base.so", needs_cublas, str(cuda / "libcublas.so.13"))
    compile_library(libraries / "libggml.so", "int start() { return 0; }")
    source = folder / "rpc-server.cpp"
    source.write_text("int start(), compute(); int main() { return start() + compute(); }\n")
    rpc_build.compile_server(source, libraries, [cuda])
    environment = {**os.environ, "LD_LIBRARY_PATH": str(cuda)}
    assert subprocess.run([libraries / "rpc-server"], env=environment, check=False).returncode == 7


class Pip:
    """In place of pip: what it was asked for, and whether it can."""

    def __init__(self) -> None:
        self.n_calls = 0
        self.works = True

    def __call__(self, command: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        self.n_calls += 1
        target = Path(command[command.index("--target") + 1])
        target.mkdir(parents=True)
        (target / f"package{self.n_calls}.py").touch()
        return subprocess.CompletedProcess(command, 0 if self.works else 1)


def test_packages_are_installed_once_and_kept_until_others_are_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = Pip()
    monkeypatch.setattr("rpc_build.subprocess.run", pip)

    def packages() -> set[str]:
        return {path.name for path in (folder / "python").glob("*.py")}

    for _ in range(2):
        rpc_build.install_packages()
        assert packages() == {"package1.py"}
    assert pip.n_calls == 1
    monkeypatch.setattr(rpc_build, "SERVER_PACKAGES", ("another",))
    pip.works = False
    with pytest.raises(PrepareError, match="pip failed"):
        rpc_build.install_packages()
    assert packages() == {"package1.py"}
    pip.works = True
    rpc_build.install_packages()
    assert packages() == {"package3.py"}


def test_a_build_that_fails_is_no_build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    rpc_build.BUILT.touch()
    configured(folder, {}, monkeypatch)
    assert not rpc_build.BUILT.exists()
