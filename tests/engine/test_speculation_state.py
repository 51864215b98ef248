"""What speculation learnt: kept per model, machine and budget, and never in the way."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from fake_experts import LAYOUT, MODEL

from s2moe.engine.hot_experts import ModelIdentity
from s2moe.engine.kept_file import MAX_FILES
from s2moe.engine.speculation_state import (
    MAX_FILE_BYTES,
    SAVE_INTERVAL_SECONDS,
    Circumstances,
    SpeculationState,
)

LEARNT = b'{"version": 1, "costs": [0.5, 2e-3]}'
HERE = Circumstances.of(MODEL, "cpu, 2 threads", 0.4)


def opened(directory: Path, circumstances: Circumstances = HERE) -> SpeculationState:
    return SpeculationState(circumstances, directory)


def kept(directory: Path, circumstances: Circumstances = HERE) -> bytes | None:
    return opened(directory, circumstances).load()


def test_next_run_gets_what_this_one_saved(tmp_path: Path) -> None:
    assert kept(tmp_path) is None
    opened(tmp_path).save(LEARNT)
    assert kept(tmp_path) == LEARNT
    opened(tmp_path).save(b"{}")
    assert kept(tmp_path) == b"{}"
    (folder,) = tmp_path.iterdir()
    assert [file.suffix for file in folder.iterdir()] == [".json"]  # no half-written file stays


@pytest.mark.parametrize(
    "other",
    [
        Circumstances.of(ModelIdentity.of_layout({**LAYOUT, "name": "Other"}), "cpu, 2 threads", 0.4),
        Circumstances.of(MODEL, "cpu, 4 threads", 0.4),
        Circumstances.of(MODEL, "cpu, 2 threads", 0.9),
    ],
    ids=["model", "hardware", "budget"],
)
def test_circumstances_are_kept_apart(tmp_path: Path, other: Circumstances) -> None:
    opened(tmp_path).save(LEARNT)
    assert kept(tmp_path, other) is None
    opened(tmp_path, other).save(b"[2]")
    assert (kept(tmp_path), kept(tmp_path, other)) == (LEARNT, b"[2]")


def test_nearly_the_same_budget_is_the_same(tmp_path: Path) -> None:
    opened(tmp_path).save(LEARNT)
    assert kept(tmp_path, Circumstances.of(MODEL, "cpu, 2 threads", 0.405)) == LEARNT


def test_nothing_new_is_not_written(tmp_path: Path) -> None:
    state = opened(tmp_path)
    state.begin(LEARNT, LEARNT)
    state.save(LEARNT)
    assert list(tmp_path.iterdir()) == []
    state.save(b"[1]")
    written = state.path.stat().st_mtime_ns
    state.save(b"[1]")
    assert state.path.stat().st_mtime_ns == written


def test_it_is_saved_every_few_minutes(tmp_path: Path) -> None:
    state = opened(tmp_path)
    n_reads = 0

    def read() -> bytes:
        nonlocal n_reads
        n_reads += 1
        return LEARNT

    state.save_if_due(1000.0, read)
    state.save_if_due(1000.0 + SAVE_INTERVAL_SECONDS - 1, read)
    assert n_reads == 0
    state.save_if_due(1000.0 + SAVE_INTERVAL_SECONDS, read)
    state.save_if_due(1001.0 + SAVE_INTERVAL_SECONDS, read)
    assert n_reads == 1
    assert kept(tmp_path) == LEARNT


def damages() -> dict[str, bytes]:
    whole = {
        "format": "s2moe-speculation-state",
        "version": 1,
        "circumstances": {"model": {}, "hardware": "", "budget_step": 1},
        "state": {},
    }
    return {
        "empty": b"",
        "cut": b'{"format": "s2moe-spec',
        "no text": b"\xff\xfe\x00",
        "another format": json.dumps({**whole, "format": "else"}).encode(),
        "deep": b"[" * 100_000,
        "too long": b" " * (MAX_FILE_BYTES + 1),
    }


@pytest.mark.parametrize("name", damages())
def test_damaged_file_is_ignored_with_one_warning_and_then_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    state = opened(tmp_path)
    state.path.parent.mkdir(parents=True)
    state.path.write_bytes(damages()[name])
    with caplog.at_level(logging.WARNING):
        assert state.load() is None
    assert len(caplog.records) == 1
    assert str(state.path) in caplog.text
    assert "ignored" in caplog.text
    state.save(LEARNT)
    assert kept(tmp_path) == LEARNT


@pytest.mark.parametrize(("key", "value"), [("version", 2), ("format", "other"), ("circumstances", None)])
def test_file_of_another_version_or_machine_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, value: object
) -> None:
    state = opened(tmp_path)
    state.save(LEARNT)
    content = json.loads(state.path.read_bytes())
    if value is None:
        content["circumstances"]["hardware"] = "another"
    else:
        content[key] = value
    state.path.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        assert kept(tmp_path) is None
    assert len(caplog.records) == 1


def test_values_that_the_speculator_cannot_use_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = opened(tmp_path)
    state.save(b'{"verify": [1, 2.5]}')
    with caplog.at_level(logging.WARNING):
        again = opened(tmp_path)
        assert again.load() is not None
        again.begin(b'{"verify":[1.0,2.5]}', b'{"verify":[1.0,2.5],"regimes":[["exact"]]}')
        assert not caplog.records
        again.begin(b'{"verify": []}', b'{"verify": []}')
    assert len(caplog.records) == 1
    assert "ignored in part" in caplog.text
    assert str(state.path) in caplog.text


def test_directory_that_cannot_be_written_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file where the directory should be")
    state = opened(blocked)
    with caplog.at_level(logging.WARNING):
        state.save(b"[1]")
        state.save(b"[2]")
    assert len(caplog.records) == 1
    blocked.unlink()
    state.save(b"[2]")  # what could not be written is not taken for saved
    assert kept(blocked) == b"[2]"


def test_pipe_in_place_of_the_file_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = opened(tmp_path)
    state.path.parent.mkdir(parents=True)
    os.mkfifo(state.path)
    assert state.load() is None
    assert "not a regular file" in caplog.text


def test_files_do_not_pile_up(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 3):
        opened(tmp_path, Circumstances.of(MODEL, f"machine {number}", 1.0)).save(LEARNT)
    assert len(list((tmp_path / "speculation").iterdir())) == MAX_FILES
