"""Counts of earlier runs: kept, faded, and never in the way."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from fake_experts import LAYOUT, MODEL, FakeExperts

from s2moe.engine.expert_history import HALF_LIFE_TOKENS, SAVE_INTERVAL_SECONDS, ExpertHistory
from s2moe.engine.hot_experts import ModelIdentity, read_hot_experts
from s2moe.engine.kept_file import MAX_FILES


def opened(directory: Path, experts: FakeExperts) -> ExpertHistory:
    history = ExpertHistory(experts, MODEL, directory)
    history.load()
    return history


def kept(directory: Path) -> list[list[int]] | None:
    hot = ExpertHistory(FakeExperts(), MODEL, directory).load()
    return None if hot is None else hot.table((1, 2), 4)


def run(directory: Path, n_tokens: int, *experts: int) -> None:
    """A server's life."""
    cache = FakeExperts()
    history = opened(directory, cache)
    cache.use(n_tokens, *experts)
    history.save()


def test_nothing_is_kept_of_a_first_run_until_experts_are_used(tmp_path: Path) -> None:
    cache = FakeExperts()
    cache.use(1, 0, 1)  # the decode that tries a loaded model out
    history = opened(tmp_path, cache)
    history.save()
    assert kept(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_runs_add_up(tmp_path: Path) -> None:
    run(tmp_path, 10, 0, 1)
    assert kept(tmp_path) == [[10, 10, 0, 0]] * 2
    run(tmp_path, 5, 0, 3)
    assert kept(tmp_path) == [[15, 10, 0, 5]] * 2


def test_saving_twice_counts_once(tmp_path: Path) -> None:
    cache = FakeExperts()
    history = opened(tmp_path, cache)
    cache.use(10, 0, 1)
    for _ in range(3):
        history.save()
    cache.use(1, 2, 3)
    history.save()
    assert kept(tmp_path) == [[10, 10, 1, 1]] * 2


def test_old_habits_fade_with_use(tmp_path: Path) -> None:
    run(tmp_path, 1000, 0, 1)
    run(tmp_path, HALF_LIFE_TOKENS, 2, 3)
    assert kept(tmp_path) == [[500, 500, HALF_LIFE_TOKENS, HALF_LIFE_TOKENS]] * 2
    for _ in range(40):
        run(tmp_path, HALF_LIFE_TOKENS, 2, 3)
    table = kept(tmp_path)
    assert table is not None
    assert table[0][0] == 0
    assert table[0][2] <= 2 * HALF_LIFE_TOKENS


def test_small_saves_fade_as_much_as_large_ones(tmp_path: Path) -> None:
    cache = FakeExperts()
    history = opened(tmp_path, cache)
    cache.use(10_000, 0, 1)
    history.save()
    for _ in range(100):
        cache.use(HALF_LIFE_TOKENS // 100, 2, 3)
        history.save()
    table = kept(tmp_path)
    assert table is not None
    assert table[0][0] == pytest.approx(5000, abs=1)


def test_it_is_saved_every_few_minutes(tmp_path: Path) -> None:
    cache = FakeExperts()
    history = opened(tmp_path, cache)
    cache.use(10, 0, 1)
    history.save_if_due(1000.0)
    history.save_if_due(1000.0 + SAVE_INTERVAL_SECONDS - 1)
    assert kept(tmp_path) is None
    history.save_if_due(1000.0 + SAVE_INTERVAL_SECONDS)
    assert kept(tmp_path) == [[10, 10, 0, 0]] * 2
    cache.use(10, 0, 1)
    history.save_if_due(1001.0 + SAVE_INTERVAL_SECONDS)
    assert kept(tmp_path) == [[10, 10, 0, 0]] * 2


def test_models_are_kept_apart(tmp_path: Path) -> None:
    run(tmp_path, 10, 0, 1)
    other = ModelIdentity.of_layout({**LAYOUT, "name": "Other"})
    assert ExpertHistory(FakeExperts(), other, tmp_path).load() is None


@pytest.mark.parametrize("damage", [b"", b"{]", b'{"format": "s2moe-hot-experts"}'])
def test_damaged_file_is_ignored_with_one_warning_and_then_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    run(tmp_path, 10, 0, 1)
    cache = FakeExperts()
    history = ExpertHistory(cache, MODEL, tmp_path)
    history.path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert history.load() is None
    assert len(caplog.records) == 1
    assert str(history.path) in caplog.text
    cache.use(3, 1, 2)
    history.save()
    assert kept(tmp_path) == [[0, 3, 3, 0]] * 2


def test_missing_file_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ExpertHistory(FakeExperts(), MODEL, tmp_path / "none").load() is None
    assert not caplog.records


def test_directory_that_cannot_be_written_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file where the directory should be")
    cache = FakeExperts()
    with caplog.at_level(logging.WARNING):
        history = ExpertHistory(cache, MODEL, blocked)
        for _ in range(3):
            cache.use(10, 0, 1)
            history.save()
    assert len(caplog.records) == 1
    # what could not be written is not lost
    blocked.unlink()
    cache.use(1, 0, 1)
    history.save()
    assert read_hot_experts(history.path, MODEL).table((1,), 4) == [[31, 31, 0, 0]]


def test_full_disk_is_logged_once_and_leaves_the_old_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, 10, 0, 1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    cache = FakeExperts()
    with caplog.at_level(logging.WARNING):
        history = opened(tmp_path, cache)
        for _ in range(3):
            cache.use(10, 2, 3)
            history.save()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert kept(tmp_path) == [[10, 10, 0, 0]] * 2


def test_files_of_many_models_do_not_pile_up(tmp_path: Path) -> None:
    run(tmp_path, 10, 0, 1)
    folder = next(tmp_path.iterdir())
    for number in range(MAX_FILES + 20):
        old = folder / f"old{number:03}.json"
        old.write_text("{}")
        os.utime(old, (number, number))
    run(tmp_path, 10, 0, 1)
    names = {file.name for file in folder.iterdir()}
    assert len(names) == MAX_FILES
    assert "old000.json" not in names
    assert f"old{MAX_FILES + 19:03}.json" in names
    assert kept(tmp_path) == [[20, 20, 0, 0]] * 2


def test_pipe_in_place_of_the_file_is_said_and_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = FakeExperts()
    history = ExpertHistory(cache, MODEL, tmp_path)
    history.path.parent.mkdir(parents=True)
    os.mkfifo(history.path)
    assert history.load() is None
    cache.use(1, 0)
    history.save()
    ignored, not_kept = (record.getMessage() for record in caplog.records)
    assert "ignored" in ignored
    assert "not a regular file" in ignored
    assert "cannot be kept" in not_kept
    assert "not a regular file" in not_kept
