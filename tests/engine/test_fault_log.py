"""Faults of a served model in the log."""

from __future__ import annotations

import pytest

from s2moe.engine.fault_log import MIN_INTERVAL_SECONDS, FaultLog


def test_one_line_per_change_of_state_and_not_too_many(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    faults = FaultLog("/models/m.gguf", lambda: now)
    faults.worked()
    for _ in range(5):
        faults.failed("blk.1 changed")
        now += MIN_INTERVAL_SECONDS
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "ERROR"
    assert "/models/m.gguf" in caplog.records[0].getMessage()
    faults.worked()
    faults.failed("blk.1 changed")
    assert len(caplog.records) == 2
    for _ in range(5):  # a state that flips with each request
        faults.worked()
        faults.failed("blk.2 changed")
    assert len(caplog.records) == 2
    now += MIN_INTERVAL_SECONDS
    faults.failed("blk.2 changed")
    assert len(caplog.records) == 3
