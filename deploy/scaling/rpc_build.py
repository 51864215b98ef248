"""Builds what layers over several machines need: llama.cpp with its RPC backend, and its rpc-server.

    .venv/bin/python deploy/scaling/rpc_build.py [--define S2MOE_CUDA=ON …]

Both come from the source release that native/llama_cpp.lock pins, unpatched, into build/native/rpc; the
libraries of s2moe are left alone. Every machine needs the same release. docs/scaling.md says what to do then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "native"))

from build import BUILD_ROOT, add_define_flag, build, exit_status  # noqa: E402
from prepare import VENDORED, PrepareError, fetch_release, say  # noqa: E402

FOLDER = BUILD_ROOT / "rpc"
PYTHON_PACKAGES = FOLDER / "python"
SERVER_SOURCE = "tools/rpc/rpc-server.cpp"
SERVER_PACKAGES = ("starlette-context>=0.3.6,<0.4",)
"""What llama_cpp.server imports and s2moe does not need."""


def build_all(defines: dict[str, str]) -> None:
    """Raises PrepareError, or OSError."""
    libraries = build("stock", {**defines, "GGML_RPC": "ON"}, FOLDER)
    source = extract_server()
    compile_server(source, libraries)
    install_packages()
    say(f"workers: {libraries / 'rpc-server'}; the machine in front: deploy/scaling/rpc_serve.py")


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


def compile_server(source: Path, libraries: Path) -> None:
    command = [*os.environ.get("CXX", "c++").split(), "-O2", "-std=c++17", "-pthread", str(source)]
    command += ["-I", str(FOLDER / "source/ggml/include"), "-L", str(libraries), "-lggml", "-lggml-base"]
    command += ["-Wl,-rpath,$ORIGIN", f"-Wl,-rpath-link,{libraries}", "-o", str(libraries / "rpc-server")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise PrepareError(f"cannot compile {SERVER_SOURCE}: {result.stderr.strip()}")


def install_packages() -> None:
    shutil.rmtree(PYTHON_PACKAGES, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--target", str(PYTHON_PACKAGES), *SERVER_PACKAGES]
    if subprocess.run(command, check=False).returncode != 0:
        raise PrepareError("pip failed (its reason is above); check the network and run the command again")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_define_flag(parser)
    arguments = parser.parse_args()
    return exit_status(lambda: build_all(dict(arguments.define)), (PrepareError, OSError))


if __name__ == "__main__":
    sys.exit(main())
