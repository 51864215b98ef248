"""Snapshots of the prompt cache in a directory, for later runs.

A file is `magic, length of the header (4 bytes, little-endian), header (JSON), tokens (int32), KV rows,
BLAKE2b-256 of all that`. Names say nothing of the text, and no log line does. Whatever is wrong with a file
or the drive is logged and costs no more than the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import struct
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final

import msgspec

from s2moe.engine.evaluated_tokens import ITEM_TYPE, TOKEN_BYTES, EvaluatedTokens

logger = logging.getLogger(__name__)

MAGIC: Final = b"S2MOEKV\x01"
SUFFIX: Final = ".s2moe-kv"
PART_SUFFIX: Final = ".part"
DIGEST_BYTES: Final = 32
MAX_HEADER_BYTES: Final = 1 << 16
MAX_TOKENS: Final = 10_000_000
STALE_SECONDS: Final = 3600.0
"""So old a half-written file belongs to nobody."""
FUTURE_NS: Final = 60 * 10**9
"""Clocks of machines that share a directory may differ by so much."""
FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
SAMPLE_BYTES: Final = 4096
N_SAMPLES: Final = 64
_LENGTH: Final = struct.Struct("<I")

FAILED: Final = "failed"
"""The event of a file that could not be written or used."""


class SnapshotIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What KV rows depend on beside the tokens. Files of another identity are not used."""

    model: str
    """Fingerprint of the model's files."""
    llama_build: str
    kv_types: str
    """Types of keys and values."""
    rope: str = ""
    """`long` or `short` where the context's length decides how positions are encoded."""
    hardware: str = ""
    """Device and processor: others round otherwise."""


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    identity: SnapshotIdentity
    n_tokens: int
    n_exact: int
    n_state_bytes: int
    """Of the KV rows."""


_header_decoder = msgspec.json.Decoder(_Header)


@dataclass(frozen=True)
class SnapshotFile:
    """One file of this identity."""

    path: Path
    evaluated: EvaluatedTokens
    n_state_bytes: int
    head_bytes: int
    """In front of the KV rows."""


class SnapshotFiles:
    """The files of one directory, which others may share. Used by one thread."""

    def __init__(
        self, directory: Path, identity: SnapshotIdentity, budget_bytes: int, events: Counter[str]
    ) -> None:
        """Reads headers and tokens of what is there; the oldest files go until all fit into `budget_bytes`.
        `events` counts what fails.

        Raises OSError when the directory cannot be made or written.
        """
        self._directory = directory
        self._identity = identity
        self._budget_bytes = budget_bytes
        self._events = events
        self._is_warned = False
        directory.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", str(directory))
        if stat.S_IMODE(directory.stat().st_mode) & 0o077:
            logger.warning(
                "%s is open to other users, who see when conversations are kept; `chmod 700` it", directory
            )
        self.entries: list[SnapshotFile] = []
        """What can be loaded."""
        self._remove_stale_parts()
        self._make_room(0, sys.maxsize)
        for _, _, path in sorted(self._files()):
            if (entry := self._read_entry(path)) is not None:
                self.entries.append(entry)

    @property
    def index_bytes(self) -> int:
        """That the tokens of the files take in memory."""
        return sum(entry.evaluated.n_bytes for entry in self.entries)

    def write(self, evaluated: EvaluatedTokens, rows: memoryview, used_ns: int) -> SnapshotFile | None:
        """Keeps a snapshot that was last used at `used_ns` (Unix time). Returns None where that failed, or
        where newer files fill the budget."""
        header = msgspec.json.encode(
            _Header(
                identity=self._identity,
                n_tokens=len(evaluated),
                n_exact=evaluated.n_exact,
                n_state_bytes=len(rows),
            )
        )
        head = b"".join((MAGIC, _LENGTH.pack(len(header)), header, _to_little_endian(evaluated.tokens)))
        path = self._directory / f"{self._name_of(evaluated)}{SUFFIX}"
        n_bytes = len(head) + len(rows) + DIGEST_BYTES
        for entry in self.entries:
            if (
                entry.path == path
                and entry.evaluated.n_exact >= evaluated.n_exact
                and self.touch(entry, used_ns)
            ):
                return entry
        self._forget(path)
        try:
            if not self._make_room(n_bytes, used_ns, replaced=path):
                return None
            self._write_atomically(path, (head, rows, _digest(head, rows)), used_ns)
        except OSError as error:
            self._events[FAILED] += 1
            if not self._is_warned:
                logger.warning(
                    "a conversation of the prompt cache cannot be kept in %s: %s",
                    *(self._directory, error.strerror or error),
                )
            self._is_warned = True
            return None
        self._is_warned = False
        entry = SnapshotFile(path, evaluated, len(rows), len(head))
        self.entries.append(entry)
        return entry

    def touch(self, entry: SnapshotFile, used_ns: int) -> bool:
        """Notes when a file was last used. Returns whether it is still there."""
        try:
            os.utime(entry.path, ns=(used_ns, used_ns))
        except OSError:
            return False
        return True

    def read(self, entry: SnapshotFile, rows: memoryview) -> bool:
        """Fills `rows` [n_state_bytes]. Returns whether the file is what was written; if not, it is dropped
        from `entries`."""
        try:
            with _open(entry.path) as file:
                head = file.read(entry.head_bytes)
                n_read = file.readinto(rows)
                intact = n_read == len(rows) and file.read(DIGEST_BYTES + 1) == _digest(head, rows)
            if not intact:
                raise ValueError("its content is damaged")
        except (OSError, ValueError) as error:
            self._events[FAILED] += 1
            self._ignore(entry.path, error)
            self._forget(entry.path)
            return False
        return True

    def remove(self, entry: SnapshotFile) -> None:
        self._forget(entry.path)
        with contextlib.suppress(OSError):
            entry.path.unlink()

    def _read_entry(self, path: Path) -> SnapshotFile | None:
        try:
            with _open(path) as file:
                return self._parse(path, file)
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            self._events[FAILED] += 1
            self._ignore(path, error)
            return None

    def _parse(self, path: Path, file: BufferedReader) -> SnapshotFile | None:
        """Raises OSError, ValueError and what msgspec raises; None for a file of another identity."""
        start = file.read(len(MAGIC) + _LENGTH.size)
        if len(start) < len(MAGIC) + _LENGTH.size or not start.startswith(MAGIC):
            raise ValueError("it is no snapshot of this version")
        (n_header,) = _LENGTH.unpack_from(start, len(MAGIC))
        if n_header > MAX_HEADER_BYTES:
            raise ValueError("its header is damaged")
        header = _header_decoder.decode(file.read(n_header))
        if not 0 < header.n_tokens <= MAX_TOKENS or not 0 <= header.n_exact <= header.n_tokens:
            raise ValueError("its header is damaged")
        head_bytes = len(start) + n_header + TOKEN_BYTES * header.n_tokens
        n_bytes = os.fstat(file.fileno()).st_size
        if header.n_state_bytes <= 0 or n_bytes != head_bytes + header.n_state_bytes + DIGEST_BYTES:
            raise ValueError("its length is not the one that it says")
        if header.identity != self._identity:
            logger.info("%s is of another model, build or machine and not used", path)
            return None
        tokens = _from_little_endian(file.read(TOKEN_BYTES * header.n_tokens))
        evaluated = EvaluatedTokens(tokens, header.n_exact)
        return SnapshotFile(path, evaluated, header.n_state_bytes, head_bytes)

    def _ignore(self, path: Path, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        logger.warning("a file of the prompt cache is ignored: %s: %s", path, why)

    def _forget(self, path: Path) -> None:
        self.entries = [entry for entry in self.entries if entry.path != path]

    def _name_of(self, evaluated: EvaluatedTokens) -> str:
        """The same for the same conversation, so that it is kept once."""
        key = hashlib.blake2b(msgspec.json.encode(self._identity), digest_size=16)
        key.update(_to_little_endian(evaluated.tokens))
        return key.hexdigest()

    def _make_room(self, n_bytes: int, used_ns: int, replaced: Path | None = None) -> bool:
        """Removes files last used before `used_ns`, the oldest first, until n_bytes more fit. Nothing is
        removed when that does not help. A file that cannot be removed is logged and stays. Raises OSError."""
        files = sorted(each for each in self._files() if each[2] != replaced)
        excess = sum(size for _, size, _ in files) + n_bytes - self._budget_bytes
        oldest = []
        for modified_ns, size, path in files:
            if excess <= 0 or modified_ns >= used_ns:
                break
            oldest.append(path)
            excess -= size
        if excess > 0:
            return False
        for path in oldest:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._ignore(path, error)
                return False
            self._forget(path)
        return True

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """When last used, size and path of every snapshot, whoever wrote it. What claims to be of the future,
        as after a clock that was set back, counts as never used."""
        end_ns = time.time_ns() + FUTURE_NS
        with os.scandir(self._directory) as found:
            for each in found:
                if not each.name.endswith(SUFFIX):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    info = each.stat(follow_symlinks=False)
                    if not stat.S_ISREG(info.st_mode):
                        yield sys.maxsize, 0, Path(each.path)  # never the oldest: it is not ours to remove
                        continue
                    used_ns = info.st_mtime_ns if info.st_mtime_ns < end_ns else 0
                    yield used_ns, info.st_size, Path(each.path)

    def _write_atomically(self, path: Path, parts: Sequence[bytes | memoryview], used_ns: int) -> None:
        """Not synchronised: after a power failure the digest tells. Raises OSError."""
        part = path.with_name(f".{path.name}.{os.getpid()}{PART_SUFFIX}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(part, flags, FILE_MODE), "wb") as file:  # noqa: PTH123 - a descriptor
                for each in parts:
                    file.write(each)
            os.utime(part, ns=(used_ns, used_ns))
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def _remove_stale_parts(self) -> None:
        for path in self._directory.glob(f".*{SUFFIX}.*{PART_SUFFIX}"):
            with contextlib.suppress(OSError):
                if path.lstat().st_mtime < time.time() - STALE_SECONDS:
                    path.unlink()


def fingerprint(files: Sequence[str]) -> str:
    """Of a model's files: their sizes, beginnings, and samples from all over them. Models that were trained
    apart differ in nearly every one. Raises OSError."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in files:
        with Path(name).open("rb", buffering=0) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            digest.update(n_bytes.to_bytes(8, "little"))
            for index in range(N_SAMPLES):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, n_bytes * index // N_SAMPLES))
    return digest.hexdigest()


def _open(path: Path) -> BufferedReader:
    """Raises OSError, also for what is not a regular file."""
    # a pipe would wait for its other end
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = open(descriptor, "rb")  # noqa: PTH123, SIM115 - a descriptor; the caller closes it
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(22, "it is not a regular file", str(path))
    return file


def _digest(head: bytes, rows: memoryview) -> bytes:
    digest = hashlib.blake2b(head, digest_size=DIGEST_BYTES)
    digest.update(rows)
    return digest.digest()


def _to_little_endian(tokens: array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def _from_little_endian(data: bytes) -> array[int]:
    """Raises ValueError for another length than that of whole tokens."""
    tokens = array(ITEM_TYPE)
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
