"""Builds what layers over several machines need: llama.cpp with its RPC backend, and its rpc-server.

    .venv/bin/python deploy/scaling/rpc_build.py [--define S2MOE_CUDA=ON …]

Both come from the source release that native/llama_cpp.lock pins, unpatched, into build/native/rpc; the
libraries of s2moe are left alone. With S2MOE_CUDA=ON the toolkit is found, or fetched, as by `make cuda`.
Every machine needs the same release. docs/scaling.md says what to do then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rpc_serve import BUILT, FOLDER, ROOT

sys.path.insert(0, str(ROOT / "native"))

from build import add_define_flag, build, exit_status
from cuda_toolkit import ERRORS, Toolkit, find_toolkit
from prepare import VENDORED, PrepareError, fetch_release, say, source_stamp

PYTHON_PACKAGES = FOLDER / "python"
SERVER_SOURCE = "tools/rpc/rpc-server.cpp"
SERVER_PACKAGES = ("starlette-context>=0.3.6,<0.4",)
"""What llama_cpp.server imports and s2moe does not need."""


def build_all(defines: Mapping[str, str]) -> None:
    """Raises one of ERRORS."""
    toolkit = find_toolkit(headers_only=False) if is_on(defines.get("S2MOE_CUDA", "OFF")) else None
    BUILT.unlink(missing_ok=True)
    libraries = build("stock", {**settings(toolkit), **defines, "GGML_RPC": "ON"}, FOLDER)
    compile_server(extract_server(), libraries, [] if toolkit is None else toolkit.library_dirs())
    install_packages()
    BUILT.write_text(source_stamp(patched=False))
    say(f"workers: {libraries / 'rpc-server'}; the machine in front: deploy/scaling/rpc_serve.py")


def is_on(value: str) -> bool:
    """As CMake reads it."""
    return value.upper() in ("1", "ON", "YES", "TRUE", "Y")


def settings(toolkit: Toolkit | None) -> dict[str, str]:
    """For native/CMakeLists.txt, which gives the libraries of an unpatched build no folders of NVIDIA's."""
    if toolkit is None:
        return {}
    rpaths = " ".join(f"-Wl,-rpath,{folder}" for folder in toolkit.library_dirs())
    defines = {**toolkit.defines(), "CMAKE_SHARED_LINKER_FLAGS": rpaths}
    if toolkit.cublas is not None:
        defines["CMAKE_CUDA_FLAGS"] = f"-isystem {toolkit.cublas / 'include'}"
    return defines


def extract_server() -> Path:
    """The one file of the release that the native build leaves out."""
    source = FOLDER / Path(SERVER_SOURCE).name
    with tarfile.open(fetch_release()) as archive:
        for member in archive:
            if member.name.endswith(f"/{VENDORED}/{SERVER_SOURCE}"):
                file = archive.extractfile(member)
                assert file is not None
                source.write_bytes(file.read())
                return source
    raise PrepareError(f"the release has no {SERVER_SOURCE}; adapt {Path(__file__).name} to it")


def compile_server(source: Path, libraries: Path, cuda_libraries: Sequence[Path]) -> None:
    """`cuda_libraries`: where the libraries find those that they need in turn."""
    command = [*os.environ.get("CXX", "c++").split(), "-O2", "-std=c++17", "-pthread", str(source)]
    command += ["-I", str(FOLDER / "source/ggml/include"), "-L", str(libraries), "-lggml", "-lggml-base"]
    command += [f"-Wl,-rpath-link,{folder}" for folder in (libraries, *cuda_libraries)]
    command += ["-Wl,-rpath,$ORIGIN", "-o", str(libraries / "rpc-server")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise PrepareError(f"cannot compile {SERVER_SOURCE}: {result.stderr.strip()}")


def install_packages() -> None:
    """Those of an earlier run stay until new ones are there, and for good if nothing else is asked for."""
    wanted = "\n".join(SERVER_PACKAGES)
    installed = PYTHON_PACKAGES / "installed.txt"
    if installed.exists() and installed.read_text() == wanted:
        return
    fresh = PYTHON_PACKAGES.with_name("python.partial")
    shutil.rmtree(fresh, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--target", str(fresh), *SERVER_PACKAGES]
    if subprocess.run(command, check=False).returncode != 0:
        raise PrepareError("pip failed (its reason is above); check the network and run the command again")
    (fresh / installed.name).write_text(wanted)
    shutil.rmtree(PYTHON_PACKAGES, ignore_errors=True)
    fresh.replace(PYTHON_PACKAGES)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_define_flag(parser)
    arguments = parser.parse_args()
    return exit_status(lambda: build_all(dict(arguments.define)), (*ERRORS, tarfile.TarError))


if __name__ == "__main__":
    sys.exit(main())
