"""One model from the hub to a folder: resumed, checked, and under its name only when it is whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from s2moe.engine.pinned_wheel import sha256_of
from s2moe.server.pull.choice import RemoteFile, RemoteModel, choose
from s2moe.server.pull.errors import (
    ChecksumError,
    DiskFullError,
    HubUnreachableError,
    InterruptedPullError,
    PullError,
)
from s2moe.server.pull.progress import Progress, percent_text, size_text

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from s2moe.server.pull.hub import Hub, Listing

_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""Of file systems that have no links, such as exFAT."""
_TAG_LENGTH: Final = 12

RETRY_WAITS_SECONDS: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Before a lost connection is taken up again; so many times, unless new bytes have come in between."""
MOST_WAIT_SECONDS: Final = 300.0
"""A hub that is busy may ask for as much."""


def pull(hub: Hub, repo: str, wanted: str | None, directory: Path, progress: Progress) -> Path:
    """Path of the model in `directory`, to be served: its file, or the first of its parts.

    A file that is there already is checked, not downloaded. Raises PullError.
    """
    listing = hub.listing(repo)
    model = choose(listing.files, wanted, repo)
    with _disk_errors(directory, model):
        directory.mkdir(parents=True, exist_ok=True)
        missing = [part for part in model.parts if not _is_there(part, directory, progress)]
        _check_space(missing, directory, model)
        for part in missing:
            _fetch(hub, listing, part, directory, progress)
    return directory / model.parts[0].name


def part_path(file: RemoteFile, directory: Path) -> Path:
    """Where the file grows. The name has its checksum: bytes of two versions never meet in one file."""
    tag = file.sha256 or f"{file.size_bytes:x}"
    return directory / f"{file.name}.{tag[:_TAG_LENGTH]}.part"


class _PartFile(io.FileIO):
    """Appends, and tells how long it is after each write."""

    def __init__(self, path: Path, tell: Callable[[int], None]) -> None:
        super().__init__(path, "ab", opener=_open_regular)
        self._tell_progress = tell

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data)
        written = 0
        # one call may write less, and does so just before a disk is full
        while written < len(view):
            written += super().write(view[written:])
        self._tell_progress(self.tell())
        return written


def _open_regular(path: str, flags: int) -> int:
    """The name can be guessed, and others may write to the folder. Raises PullError."""
    error = PullError(f"{path} is not a regular file: move it away, or choose another --dir")
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as reason:
        if reason.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe that nobody reads
            raise error from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error
    return descriptor


def _fetch(hub: Hub, listing: Listing, file: RemoteFile, directory: Path, progress: Progress) -> None:
    part = part_path(file, directory)
    with _PartFile(part, progress.at) as out:
        _lock(out, part)
        try:
            _receive(hub, listing, file, out, progress)
            _verify(part, file, progress)
        except PullError:
            if out.tell() == 0:
                part.unlink(missing_ok=True)
            raise
        except KeyboardInterrupt:
            raise InterruptedPullError(
                f"interrupted at {percent_text(out.tell(), file.size_bytes)} of {file.name}; what was "
                f"received is kept in {part}, and the same command goes on from there"
            ) from None
        _give_name(part, directory / file.name)


def _give_name(part: Path, path: Path) -> None:
    """Never to a file that somebody else made meanwhile. Raises PullError."""
    try:
        path.hardlink_to(part)
    except FileExistsError:
        raise PullError(
            f"{path} has appeared meanwhile: move it away, and run the same command again"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        part.rename(path)
        return
    part.unlink()


def _receive(hub: Hub, listing: Listing, file: RemoteFile, out: _PartFile, progress: Progress) -> None:
    have = out.tell()
    if have > file.size_bytes:
        out.truncate(0)
        have = out.seek(0)
    if have:
        progress.say(f"resuming {file.name} at {percent_text(have, file.size_bytes)}")
    else:
        progress.say(f"downloading {file.name}, {size_text(file.size_bytes)}")
    progress.start(file.name, file.size_bytes, have)
    try:
        _read_on(hub, listing, file, out, progress)
        os.fsync(out.fileno())
    finally:
        progress.stop()


def _read_on(hub: Hub, listing: Listing, file: RemoteFile, out: _PartFile, progress: Progress) -> None:
    """Until the file is whole. What may pass is tried again, as RETRY_WAITS_SECONDS says."""
    waits = iter(RETRY_WAITS_SECONDS)
    while (have := out.tell()) < file.size_bytes:
        failure: HubUnreachableError | None = None
        try:
            hub.read(listing, file, out, have)
        except HubUnreachableError as error:
            failure = error
        if out.tell() > have:
            waits = iter(RETRY_WAITS_SECONDS)
        if failure is not None:
            wait_seconds = next(waits, None)
            if not failure.passing_cause or wait_seconds is None or failure.wait_seconds > MOST_WAIT_SECONDS:
                raise failure
            wait_seconds = max(wait_seconds, failure.wait_seconds)
            percent = percent_text(out.tell(), file.size_bytes)
            progress.say(
                f"{file.name} at {percent}: {failure.passing_cause}; trying again in {wait_seconds:g} s"
            )
            time.sleep(wait_seconds)
        elif out.tell() == have:
            raise PullError(
                f"{hub.endpoint} sends nothing more of {file.name} after {size_text(have)} of "
                f"{size_text(file.size_bytes)}; run the same command again later"
            )


def _verify(path: Path, file: RemoteFile, progress: Progress) -> None:
    """Removes a file that is not the hub's, since resuming it could never end well."""
    if path.stat().st_size != file.size_bytes:
        found = f"has {path.stat().st_size} bytes, and the hub says {file.size_bytes}"
    elif file.sha256 is None:
        progress.say(f"{file.name}: the hub has no sha256 of it; only its size was checked")
        return
    else:
        progress.say(f"checking the sha256 of {file.name}")
        sha256 = sha256_of(path)
        if sha256 == file.sha256:
            return
        found = f"has the sha256 {sha256}, and the hub says {file.sha256}"
    path.unlink()
    raise ChecksumError(
        f"{file.name} {found}: it was damaged on its way and is removed; run the same command again, without "
        "proxy or mirror (HF_ENDPOINT) if it happens twice"
    )


def _is_there(file: RemoteFile, directory: Path, progress: Progress) -> bool:
    """Raises PullError when another file has the name: it may be somebody's work."""
    path = directory / file.name
    if not os.path.lexists(path):
        return False
    if path.is_file() and path.stat().st_size == file.size_bytes:
        progress.say(f"{path} is there; checking it")
        if file.sha256 is None or sha256_of(path) == file.sha256:
            return True
    raise PullError(
        f"{path} exists and is not the file that the hub has: move it away, or choose another --dir"
    )


def _check_space(missing: list[RemoteFile], directory: Path, model: RemoteModel) -> None:
    needed = 0
    for file in missing:
        part = part_path(file, directory)
        have = part.stat().st_size if part.exists() else 0
        needed += file.size_bytes - (have if have <= file.size_bytes else 0)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise DiskFullError(
            f"{directory} has {size_text(free)} free, and {model.label} needs {size_text(needed)} more: free "
            "some, or choose another --dir"
        )


def _lock(out: _PartFile, part: Path) -> None:
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PullError(f"another s2moe pull is writing {part}; wait for it") from error


@contextlib.contextmanager
def _disk_errors(directory: Path, model: RemoteModel) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise DiskFullError(
                f"no space left in {directory}: {model.label} takes {size_text(model.size_bytes)}; free some "
                "and run the same command again; it goes on where it stopped"
            ) from error
        raise PullError(
            f"cannot write to {directory}: {error.strerror or error}; make it writable, or choose another "
            "--dir"
        ) from error
