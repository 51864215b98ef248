"""The budget is kept at the cost of slots."""

from __future__ import annotations

import logging

import pytest

from s2moe.engine.memory import MIB
from s2moe.engine.memory_guard import MARGIN_BYTES, STEP_BYTES, MemoryGuard
from s2moe.engine.native_experts import ExpertStats

BUDGET_BYTES = 1000 * MIB


class Cache:
    """Slots that take `capacity_bytes`, and processes that take `other_bytes` beside them."""

    def __init__(self, capacity: int, resident: int, other: int, floor: int = 10) -> None:
        self.capacity_bytes = capacity * MIB
        self.resident_bytes = resident * MIB
        self.other_bytes = other * MIB
        self.floor_bytes = floor * MIB
        self.now = 0.0
        self.guard = MemoryGuard(
            self, BUDGET_BYTES, lambda: self.other_bytes + self.resident_bytes, clock=lambda: self.now
        )

    def stats(self) -> ExpertStats:
        return ExpertStats(capacity_bytes=self.capacity_bytes, resident_bytes=self.resident_bytes)

    def shrink(self, capacity_bytes: int) -> int:
        self.capacity_bytes = max(capacity_bytes, self.floor_bytes)
        self.resident_bytes = min(self.resident_bytes, self.capacity_bytes)
        return self.capacity_bytes

    def grow(self, capacity_bytes: int) -> int:
        self.capacity_bytes = max(self.capacity_bytes, capacity_bytes)
        return self.capacity_bytes

    def wait(self, seconds: int) -> None:
        """A check each second."""
        for _ in range(seconds):
            self.now += 1
            self.guard.check()


class Conversations:
    """Memory of `cache.other_bytes` that can be done without."""

    def __init__(self, cache: Cache, n_bytes: int) -> None:
        self.cache = cache
        self.n_bytes = n_bytes

    def drop(self, n_bytes: int) -> int:
        freed = min(self.n_bytes, n_bytes)
        self.n_bytes -= freed
        self.cache.other_bytes -= freed
        return freed


def test_conversations_go_before_slots(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(capacity=600, resident=600, other=410)
    kept = Conversations(cache, 50 * MIB)
    cache.guard = MemoryGuard(
        cache, BUDGET_BYTES, lambda: cache.other_bytes + cache.resident_bytes, droppable=kept
    )
    with caplog.at_level(logging.WARNING):
        cache.guard.check()
    assert kept.n_bytes == 50 * MIB - (10 * MIB + MARGIN_BYTES + STEP_BYTES)
    assert (cache.capacity_bytes, cache.guard.n_drops, cache.guard.n_shrinks) == (600 * MIB, 1, 0)
    assert "prompt cache" in caplog.text
    # and slots when that is not enough
    cache.other_bytes += 60 * MIB
    cache.guard.check()
    assert (kept.n_bytes, cache.guard.n_drops, cache.guard.n_shrinks) == (0, 2, 1)
    # what is not there is not dropped again
    cache.other_bytes += 60 * MIB
    cache.guard.check()
    assert (cache.guard.n_drops, cache.guard.n_shrinks) == (2, 2)


def test_nothing_happens_within_the_budget() -> None:
    cache = Cache(capacity=600, resident=600, other=390)
    cache.guard.check()
    assert (cache.capacity_bytes, cache.guard.n_shrinks) == (600 * MIB, 0)


def test_excess_is_given_back_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(capacity=600, resident=600, other=450)
    with caplog.at_level(logging.WARNING):
        cache.guard.check()
        cache.guard.check()
    assert cache.capacity_bytes == 550 * MIB - MARGIN_BYTES - STEP_BYTES
    assert cache.guard.n_shrinks == 1
    assert len(caplog.records) == 1
    assert "1050 MiB of the budget of 1000 MiB" in caplog.text


def test_it_acts_before_the_budget_is_exceeded() -> None:
    cache = Cache(capacity=600, resident=600, other=398)
    cache.guard.check()
    assert cache.capacity_bytes == 602 * MIB - MARGIN_BYTES - STEP_BYTES


def test_slots_not_filled_yet_are_no_use() -> None:
    cache = Cache(capacity=600, resident=100, other=450)
    cache.guard.check()
    assert cache.guard.n_shrinks == 0


def test_floor_is_kept_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(capacity=20, resident=20, other=1200)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            cache.guard.check()
    assert cache.capacity_bytes == cache.floor_bytes
    assert cache.guard.n_shrinks == 1
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "--memory-budget" in errors[0].getMessage()


# ── slots come back ──


def test_slots_come_back_when_there_was_room_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(capacity=600, resident=600, other=450)
    cache.guard.check()
    assert cache.capacity_bytes < 550 * MIB
    cache.other_bytes = 300 * MIB
    cache.wait(29)
    assert cache.guard.n_grows == 0
    with caplog.at_level(logging.INFO):
        cache.wait(5)
    assert (cache.capacity_bytes, cache.guard.n_grows) == (600 * MIB, 1)
    assert "grows" in caplog.text
    # never more than there was at first
    cache.wait(100)
    assert (cache.capacity_bytes, cache.guard.n_grows) == (600 * MIB, 1)


def test_room_that_comes_and_goes_brings_no_slots_back() -> None:
    cache = Cache(capacity=600, resident=600, other=450)
    cache.guard.check()
    for _ in range(10):
        cache.other_bytes = 300 * MIB
        cache.wait(20)
        cache.other_bytes = 450 * MIB
        cache.wait(1)
    assert (cache.guard.n_shrinks, cache.guard.n_grows) == (1, 0)


def test_slots_that_had_to_go_again_come_back_later() -> None:
    cache = Cache(capacity=600, resident=600, other=450)
    for seconds in (30, 60, 120):
        cache.other_bytes = 450 * MIB
        cache.resident_bytes = cache.capacity_bytes
        cache.guard.check()
        cache.other_bytes = 300 * MIB
        n_grows = cache.guard.n_grows
        cache.wait(seconds)
        assert cache.guard.n_grows == n_grows
        cache.wait(5)
        assert cache.guard.n_grows == n_grows + 1


def test_empty_slots_are_not_taken_for_room() -> None:
    cache = Cache(capacity=600, resident=600, other=450)
    cache.guard.check()
    cache.resident_bytes = 10 * MIB
    cache.wait(100)
    assert cache.guard.n_grows == 0


def test_no_slot_comes_that_was_never_given_back() -> None:
    cache = Cache(capacity=600, resident=600, other=10)
    cache.wait(100)
    assert cache.guard.n_grows == 0
