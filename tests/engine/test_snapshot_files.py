"""Files of the prompt cache: what is written, what is believed, and what goes."""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from s2moe.engine.evaluated_tokens import EvaluatedTokens, token_array
from s2moe.engine.snapshot_files import (
    MAGIC,
    SUFFIX,
    SnapshotFiles,
    SnapshotIdentity,
    fingerprint,
)

IDENTITY = SnapshotIdentity(model="m", llama_build="b1", kv_types="1 1")
TOKENS = EvaluatedTokens(token_array(range(70_000, 70_040)), 25)
ROWS = bytes(range(256)) * 40
MIB = 2**20


class Folder:
    """A directory and what is read from it."""

    def __init__(self, path: Path, *, budget_bytes: int = MIB, identity: SnapshotIdentity = IDENTITY) -> None:
        self.events = Counter[str]()
        self.path = path
        self.files = SnapshotFiles(path, identity, budget_bytes, self.events)

    def write(self, evaluated: EvaluatedTokens = TOKENS, used_ns: int = 10**18) -> Path | None:
        entry = self.files.write(evaluated, memoryview(ROWS), used_ns)
        return None if entry is None else entry.path

    def read(self) -> bytes | None:
        """Of the only entry; None: its file is not believed."""
        (entry,) = self.files.entries
        rows = bytearray(entry.n_state_bytes)
        return bytes(rows) if self.files.read(entry, memoryview(rows)) else None


def tokens_of(seed: int, n_tokens: int = 40) -> EvaluatedTokens:
    return EvaluatedTokens(token_array(range(seed, seed + n_tokens)), n_tokens)


def test_what_was_written_is_read_back_by_the_next_run(tmp_path: Path) -> None:
    path = Folder(tmp_path / "a" / "b").write()
    again = Folder(tmp_path / "a" / "b")
    (entry,) = again.files.entries
    assert entry.evaluated == TOKENS
    assert again.read() == ROWS
    assert entry.path == path
    assert again.files.index_bytes == 4 * len(TOKENS)
    assert not again.events


def test_only_the_user_may_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = os.umask(0)
    try:
        path = Folder(tmp_path / "kept").write()
    finally:
        os.umask(old)
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert caplog.text == ""
    path.parent.chmod(0o755)
    Folder(path.parent)
    assert "chmod 700" in caplog.text


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = Folder(tmp_path).write()
    assert path is not None
    intact = path.read_bytes()
    places = [*range(0, 12), 20, 60, len(intact) - len(ROWS) - 40, len(intact) - 40, len(intact) - 1]
    for place in places:
        damaged = bytearray(intact)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        folder = Folder(tmp_path)
        # another identity is no failure, but no entry either
        assert not folder.files.entries or folder.read() is None, place
        assert folder.files.entries == []
    path.write_bytes(intact)
    assert Folder(tmp_path).read() == ROWS


@pytest.mark.parametrize("length", [0, 5, 11, 12, 40, 200, 1000, -1])
def test_truncated_file_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int) -> None:
    path = Folder(tmp_path).write()
    assert path is not None
    path.write_bytes(path.read_bytes()[:length])
    folder = Folder(tmp_path)
    assert folder.files.entries == []
    assert folder.events == {"failed": 1}
    assert str(path) in caplog.text
    assert path.exists()


@pytest.mark.parametrize("field", ["model", "llama_build", "kv_types", "rope", "hardware"])
def test_foreign_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str) -> None:
    path = Folder(tmp_path).write()
    assert path is not None
    other = msgspec.structs.replace(IDENTITY, **{field: "other"})
    with caplog.at_level(logging.INFO):
        folder = Folder(tmp_path, identity=other)
    assert folder.files.entries == []
    assert not folder.events
    assert "not used" in caplog.text
    assert path.exists()


def test_pipes_links_and_folders_are_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"pipe{SUFFIX}")
    (tmp_path / f"folder{SUFFIX}").mkdir()
    (tmp_path / f"link{SUFFIX}").symlink_to("/dev/zero")
    (tmp_path / "notes.txt").write_text("of the user")
    folder = Folder(tmp_path)
    assert folder.files.entries == []
    assert folder.events == {"failed": 3}
    assert (tmp_path / "notes.txt").exists()


def test_header_that_is_nested_too_deeply_is_ignored(tmp_path: Path) -> None:
    header = b'{"x":' + b"[" * 60_000
    path = tmp_path / f"deep{SUFFIX}"
    path.write_bytes(MAGIC + struct.pack("<I", len(header)) + header)
    folder = Folder(tmp_path)
    assert (folder.files.entries, folder.events) == ([], {"failed": 1})


def test_folder_with_the_name_of_a_file_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / f"folder{SUFFIX}").mkdir()
    os.utime(tmp_path / f"folder{SUFFIX}", (1, 1))
    folder = Folder(tmp_path)
    for seed in (1, 2, 3):
        folder.write(tokens_of(seed), used_ns=10**18 + seed)
    assert len(Folder(tmp_path, budget_bytes=12_000).files.entries) == 1
    assert (tmp_path / f"folder{SUFFIX}").is_dir()


def test_file_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Folder(tmp_path, budget_bytes=12_000)
    assert folder.write(tokens_of(1), used_ns=10**18) is not None

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert folder.write(tokens_of(2), used_ns=10**18 + 1) is None
    assert "Operation not permitted" in caplog.text
    Folder(tmp_path, budget_bytes=1)


def test_file_of_the_future_makes_room_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path, budget_bytes=35_000)  # three of them
    paths = [folder.write(tokens_of(seed), used_ns=10**18 + seed) for seed in (1, 2, 3)]
    assert paths[1] is not None
    os.utime(paths[1], (4 * 10**9, 4 * 10**9))
    assert folder.write(tokens_of(4), used_ns=10**18 + 4) is not None
    assert [path is not None and path.exists() for path in paths] == [True, False, True]


def test_oldest_files_make_room(tmp_path: Path) -> None:
    folder = Folder(tmp_path, budget_bytes=35_000)  # three of them
    paths = [folder.write(tokens_of(seed), used_ns=10**18 + seed) for seed in (1, 2, 3, 4)]
    assert [path is not None and path.exists() for path in paths] == [False, True, True, True]
    assert len(folder.files.entries) == 3
    # what is older than all of them is not worth one of them
    assert folder.write(tokens_of(9), used_ns=10**18) is None
    assert len(folder.files.entries) == 3
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 35_000


def test_smaller_budget_takes_effect_at_the_start(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for seed in (1, 2, 3):
        folder.write(tokens_of(seed), used_ns=10**18 + seed)
    assert len(Folder(tmp_path, budget_bytes=12_000).files.entries) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_use_keeps_a_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path, budget_bytes=35_000)
    for seed in (1, 2, 3):
        folder.write(tokens_of(seed), used_ns=10**18 + seed)
    assert folder.files.touch(folder.files.entries[0], 10**18 + 10)
    folder.write(tokens_of(4), used_ns=10**18 + 11)
    assert [entry.evaluated.tokens[0] for entry in folder.files.entries] == [1, 3, 4]


def test_file_that_does_not_fit_at_all_is_not_written(tmp_path: Path) -> None:
    folder = Folder(tmp_path, budget_bytes=1000)
    assert folder.write() is None
    assert list(tmp_path.iterdir()) == []
    assert not folder.events


def test_same_conversation_is_written_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    path = folder.write()
    assert path is not None
    inode = path.stat().st_ino
    assert folder.write(used_ns=10**18 + 5) == path
    assert path.stat().st_ino == inode
    assert path.stat().st_mtime_ns == 10**18 + 5
    # more of it is exact now
    assert folder.write(EvaluatedTokens(TOKENS.tokens, len(TOKENS))) == path
    assert path.stat().st_ino != inode
    assert len(folder.files.entries) == 1


def test_full_disk_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = Folder(tmp_path)
    monkeypatch.setattr(SnapshotFiles, "_write_atomically", full)
    assert folder.write() is None
    assert folder.write() is None
    assert folder.events == {"failed": 2}
    assert caplog.text.count("No space left on device") == 1


def test_interrupted_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("s2moe.engine.snapshot_files.os.utime", fail)
    assert folder.write() is None
    assert list(tmp_path.iterdir()) == []


def test_old_parts_of_files_are_removed(tmp_path: Path) -> None:
    parts = [tmp_path / f".{name}{SUFFIX}.1.part" for name in ("old", "new")]
    for part in parts:
        part.write_bytes(b"half")
    os.utime(parts[0], (0, 0))
    Folder(tmp_path)
    assert [part.exists() for part in parts] == [False, True]


def test_directory_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match="taken"):
        Folder(tmp_path / "taken")


def test_fingerprint_tells_models_of_one_size_apart(tmp_path: Path) -> None:
    files = []
    for name, middle in (("a", 0), ("b", 0), ("c", 1)):
        data = bytearray(MIB)
        data[MIB // 2] = middle
        (tmp_path / name).write_bytes(data)
        files.append(str(tmp_path / name))
    assert fingerprint(files[:1]) == fingerprint(files[1:2]) != fingerprint(files[2:])
