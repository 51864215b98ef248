"""Configures and builds the native libraries with CMake, showing progress.

    python3 native/build.py [--variant s2moe|stock|stock-default-flags] [--define NAME=VALUE …]

Variants, each in its own folder below build/native:

    s2moe                 the patched libllama, llama.cpp's common and libs2moe: what the engine loads
    stock                 unpatched libllama with the same flags: what our bits are compared with
    stock-default-flags   unpatched libllama as released: what our speed is compared with

Standard library only. A second run without changes takes about a second.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prepare import NATIVE_DIR, PrepareError, say

BUILD_ROOT = NATIVE_DIR.parent / "build" / "native"
VARIANT_DEFINES = {
    "s2moe": {},
    "stock": {"S2MOE_PATCHED": "OFF"},
    "stock-default-flags": {"S2MOE_PATCHED": "OFF", "S2MOE_LLAMAFILE": "ON"},
}
MEMORY_PER_JOB_BYTES = 2 << 30
PROGRESS = re.compile(r"^\[\s*(?:(\d+)/(\d+)|(\d+)%)\]")


def job_count() -> int:
    """One compiler per usable core, fewer when memory is short (large templates take up to 2 GiB each)."""
    meminfo = Path("/proc/meminfo")
    cores = len(os.sched_getaffinity(0))
    if not meminfo.exists():
        return cores
    available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    return (
        cores if available is None else max(1, min(cores, int(available[1]) * 1024 // MEMORY_PER_JOB_BYTES))
    )


def require_tools() -> None:
    missing = [tool for tool in ("cmake", "git") if shutil.which(tool) is None]
    for variable, compiler, package in (("CC", "cc", "gcc"), ("CXX", "c++", "g++")):
        if shutil.which(os.environ.get(variable, compiler).split()[0]) is None:
            missing.append(package)
    if missing:
        raise PrepareError(f"missing {', '.join(missing)}; on Debian: apt-get install {' '.join(missing)}")


def run_logged(command: list[str], log: Path, *, show_progress: bool) -> None:
    """Runs a command, its output in `log`; on failure the first error lines go to the terminal."""
    shown = -1
    last_time = 0.0
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if line.startswith("native: "):
                say(line.removeprefix("native: ").rstrip())
            match = PROGRESS.match(line) if show_progress else None
            if match is None:
                continue
            percent = int(match[3]) if match[3] else 100 * int(match[1]) // int(match[2])
            if percent >= shown + 10 or (percent > shown and time.monotonic() > last_time + 10):
                shown, last_time = percent, time.monotonic()
                say(f"compiling {percent} %")
        returncode = process.wait()
    if returncode != 0:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.search(r"error\b|undefined reference", line, re.I)]
        for line in (errors or lines)[:8]:
            print(f"    {line}", file=sys.stderr)
        raise PrepareError(f"`{' '.join(command[:2])} …` failed; the whole output is in {log}")


def build(variant: str, defines: dict[str, str], folder: Path, target: str | None = None) -> Path:
    """Returns the folder of the libraries. With `target`, only that is built."""
    require_tools()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two `make` at once must not write the same files
        return _build(variant, defines, folder, target)


def _build(variant: str, defines: dict[str, str], folder: Path, target: str | None) -> Path:
    settings = {**VARIANT_DEFINES[variant], **defines}
    # PYTHONHOME and virtual environments do not matter: prepare.py needs the standard library and pip only
    configure = ["cmake", "-S", str(NATIVE_DIR), "-B", str(folder), f"-DPython3_EXECUTABLE={sys.executable}"]
    configure += [f"-D{name}={value}" for name, value in settings.items()]
    if shutil.which("ninja") and not (folder / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    started = time.monotonic()
    run_logged(configure, folder / "configure.log", show_progress=False)
    jobs = job_count()
    if target is None and not any((folder / "bin").glob("libllama.so*")):
        say(f"compiling llama.cpp ({variant}) with {jobs} jobs: minutes, once")
    command = ["cmake", "--build", str(folder), "--parallel", str(jobs)]
    command += [] if target is None else ["--target", target]
    run_logged(command, folder / "build.log", show_progress=True)
    what = (
        f"{variant} libraries are up to date in {folder / 'bin'}"
        if target is None
        else f"{target}: all is well"
    )
    say(f"{what} ({time.monotonic() - started:.0f} s)")
    return folder / "bin"


def add_define_flag(parser: argparse.ArgumentParser) -> None:
    """--define, as a list of names and values."""
    parser.add_argument(
        "--define",
        action="append",
        type=_cmake_setting,
        default=[],
        metavar="NAME=VALUE",
        help="CMake setting, e.g. S2MOE_CUDA=ON",
    )


def _cmake_setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"write NAME=VALUE, not {text!r}")
    return name, value


def exit_status(action: Callable[[], object], errors: tuple[type[Exception], ...]) -> int:
    """Of a program that does `action`; `errors` end it with a line."""
    try:
        action()
    except errors as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run the same command again to go on")
        return 130
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", choices=list(VARIANT_DEFINES), default="s2moe")
    parser.add_argument("--folder", type=Path, help="build folder (default: build/native/VARIANT)")
    add_define_flag(parser)
    parser.add_argument("--check-tools", action="store_true", help="only check that the tools are there")
    arguments = parser.parse_args()
    folder = (arguments.folder or BUILD_ROOT / arguments.variant).resolve()

    def run() -> None:
        if arguments.check_tools:
            require_tools()
        else:
            build(arguments.variant, dict(arguments.define), folder)

    return exit_status(run, (PrepareError, OSError))


if __name__ == "__main__":
    sys.exit(main())
