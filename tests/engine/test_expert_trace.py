"""The file of `--expert-trace`."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import cast

import pytest

from s2moe.engine.errors import EngineStartError
from s2moe.engine.expert_trace import LAYER_FIELDS, ExpertTraceFile
from s2moe.engine.native_experts import Experts, ExpertTrace


class RecordedExperts:
    """Hands out prepared records as Experts.take_trace() does."""

    layers = (1, 2)

    def __init__(self, n_records: int) -> None:
        self.kept = [
            ExpertTrace(
                begin_ns=100 + n, layer=n, n_hits=6, n_misses=2, missed_bytes=10 * n, stall_seconds=0.25
            )
            for n in range(n_records)
        ]
        self.n_max = 0

    def set_trace(self, n_max: int) -> None:
        self.n_max = n_max

    def take_trace(self, n_max: int) -> list[ExpertTrace]:
        taken, self.kept = self.kept[:n_max], self.kept[n_max:]
        return taken


@pytest.mark.parametrize("n_records", [0, 2, 4, 11])
def test_one_line_per_decode_with_all_its_records(n_records: int, tmp_path: Path) -> None:
    experts = RecordedExperts(n_records)
    path = tmp_path / "trace"
    trace = ExpertTraceFile(path, cast(Experts, experts))
    assert experts.n_max > 1000
    begin_ns = time.monotonic_ns()
    trace.add(begin_ns, 3)
    experts.kept = RecordedExperts(1).kept
    trace.add(begin_ns, 1)
    first, second = (json.loads(line) for line in path.read_text().splitlines())  # before it is closed
    assert (first["begin_ns"], first["n_tokens"], len(first["layers"])) == (begin_ns, 3, n_records)
    assert begin_ns <= first["end_ns"] <= time.monotonic_ns()
    assert [dict(zip(LAYER_FIELDS, layer, strict=True))["layer"] for layer in first["layers"]] == [
        *range(n_records)
    ]
    assert second["layers"] == [[0, 100, 6, 2, 0, 0.25, 0.0]]
    trace.close()
    assert experts.n_max == 0


def test_a_full_drive_ends_the_trace_with_one_line_in_the_log_and_fails_no_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace"
    experts = RecordedExperts(1)
    trace = ExpertTraceFile(path, cast(Experts, experts))
    trace.add(time.monotonic_ns(), 1)
    write = os.write
    space = 10

    def write_some(descriptor: int, data: bytes) -> int:
        nonlocal space
        if space == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken, space = write(descriptor, data[:space]), 0
        return taken

    monkeypatch.setattr(os, "write", write_some)
    for _ in range(3):
        experts.kept = RecordedExperts(1).kept
        trace.add(time.monotonic_ns(), 1)
    (record,) = caplog.records
    assert (record.levelname, str(path) in record.getMessage()) == ("ERROR", True)
    assert "No space left on device" in record.getMessage()
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 1
    assert experts.n_max == 0
    trace.close()


@pytest.mark.parametrize("kind", ["fifo", "/dev/full", "/dev/null"])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = Path(kind)
    if kind == "fifo":
        path = tmp_path / kind
        os.mkfifo(path)
    with pytest.raises(EngineStartError, match=f"cannot write {path}: it is not a regular file"):
        ExpertTraceFile(path, cast(Experts, RecordedExperts(0)))


def test_a_drive_that_is_full_at_the_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_none(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write_none)
    with pytest.raises(EngineStartError, match="No space left on device; choose another file"):
        ExpertTraceFile(tmp_path / "trace", cast(Experts, RecordedExperts(0)))


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"--expert-trace: cannot write .*/none/trace: No such file"):
        ExpertTraceFile(tmp_path / "none" / "trace", cast(Experts, RecordedExperts(0)))
