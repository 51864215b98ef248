"""The file of `--expert-trace`."""

from __future__ import annotations

import json
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


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"--expert-trace: cannot write .*/none/trace: No such file"):
        ExpertTraceFile(tmp_path / "none" / "trace", cast(Experts, RecordedExperts(0)))
