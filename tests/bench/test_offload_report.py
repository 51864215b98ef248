"""The arithmetic of the offloading benchmark on made-up measurements."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from s2moe.bench.answer import Answer, bytes_per_token, tokens_per_second
from s2moe.bench.drive import Drive, DriveError
from s2moe.bench.expert_bound import RunTrace, TraceError, analyse, read_trace
from s2moe.bench.limited_runs import Run, compare, describe, judge
from s2moe.bench.offload import drive_header
from s2moe.bench.process import EXIT_NO_LIMIT, LimitReport, ReadLimit, limited, peak_rss_bytes
from s2moe.bench.targets import MIB, Line, at_least, at_most, table

SECOND = 10**9


def answer(first: float, last: float, n_tokens: int, n_bytes: int = 0) -> Answer:
    return Answer(
        text="…",
        n_prompt_tokens=10,
        n_tokens=n_tokens,
        started_ns=int((first - 1) * SECOND),
        first_ns=int(first * SECOND),
        last_ns=int(last * SECOND),
        started_read_bytes=0,
        first_read_bytes=100,
        last_read_bytes=100 + n_bytes,
    )


def write_trace(path: Path, decodes: list[tuple[float, float, int, list[tuple[int, float, float]]]]) -> Path:
    """Each decode: begin, end, tokens, and (missed bytes, stall, compute) of its layers."""
    with path.open("w") as file:
        for begin, end, n_tokens, layers in decodes:
            records = [
                [number, int(begin * SECOND), 6, 2 if missed else 0, missed, stall, compute]
                for number, (missed, stall, compute) in enumerate(layers)
            ]
            line = {"begin_ns": int(begin * SECOND), "end_ns": int(end * SECOND), "n_tokens": n_tokens}
            file.write(json.dumps({**line, "layers": records}) + "\n")
    return path


def test_speed_and_bytes_count_between_the_first_and_the_last_token() -> None:
    answers = [answer(10, 11, 5, 400), answer(20, 23, 9, 2000)]
    assert tokens_per_second(answers) == pytest.approx(12 / 4)
    assert bytes_per_token(answers) == pytest.approx(2400 / 12)
    assert answers[0].first_token_seconds == pytest.approx(1)


def test_bound_takes_the_slower_of_drive_and_compute_in_each_layer(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace",
        [
            (0.0, 9.99, 30, [(5000, 5.0, 1.0)]),  # the prompt, which does not count
            # 0.1 s dense; 100 bytes take 0.1 s and hide 0.05 s of computing; then 0.2 s of computing
            (10.0, 10.6, 1, [(100, 0.25, 0.05), (0, 0.0, 0.2)]),
            (10.6, 10.9, 1, [(0, 0.0, 0.1), (0, 0.0, 0.1)]),
        ],
    )
    run = analyse(list(read_trace(trace)), [answer(10.0, 11.0, 3)], bytes_per_second=1000)
    assert run.n_decodes == 2
    assert run.bytes_per_token == 50
    assert run.hit_ratio == pytest.approx(24 / 26)
    assert run.dense_seconds == pytest.approx((0.1 + 0.1) / 2)
    assert run.stall_seconds == pytest.approx(0.25 / 2)
    assert run.compute_seconds == pytest.approx(0.45 / 2)
    assert run.between_seconds == pytest.approx(0.1 / 2)
    assert run.bound_tokens_per_second == pytest.approx(2 / (0.1 + 0.1 + 0.2 + 0.1 + 0.2))
    assert run.bound_share == pytest.approx(0.7)


def test_a_trace_of_another_run_is_refused(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", [(10.0, 10.6, 1, [])])
    with pytest.raises(TraceError, match=r"1 decodes .* by 2"):
        analyse(list(read_trace(trace)), [answer(10.0, 11.0, 3)], bytes_per_second=1000)


def a_run(drive: float = 1024.0 * MIB, speed: float = 7.0) -> Run:
    trace = RunTrace(95, 90.0 * MIB, 0.7, 0.01, 0.01, 0.1, 0.001, 8.0, speed / 8.0)
    return Run(
        drive_bytes_per_second=drive,
        start_seconds=1.0,
        start_read_bytes=80 * MIB,
        tokens_per_second=speed,
        bytes_per_token=100.0 * MIB,
        server_bytes_per_token=99.0 * MIB,
        metrics_share=0.99,
        trace=trace,
        peak_rss={"front_end": 60 * MIB, "engine": 980 * MIB},
        overhead_bytes=120 * MIB,
        limit=LimitReport(1050 * MIB, 1049 * MIB, 0),
        texts=["…"],
        n_tokens=[96],
    )


def verdicts(run: Run) -> dict[str, bool | None]:
    return {line.what: line.passed for line in judge("1050 MiB", 1050 * MIB, [run])}


def test_a_run_is_judged_against_the_peer_at_the_same_drive() -> None:
    speed = "speed / peer scaled by the drive"
    assert verdicts(a_run())[speed] is True
    assert verdicts(a_run(drive=1.2 * 1024 * MIB))[speed] is False, "the peer would be faster here too"
    assert verdicts(a_run(speed=6.4))[speed] is False


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"bytes_per_token": 141.0 * MIB}, "bytes per token (kernel)"),
        ({"overhead_bytes": 151 * MIB}, "processes beside weights, KV, buffers, slots"),
        ({"peak_rss": {"front_end": 71 * MIB, "engine": 980 * MIB}}, "peak RSS of both processes"),
        ({"limit": LimitReport(1050 * MIB, 1050 * MIB, 1)}, "processes killed for want of memory"),
        ({"trace": replace(a_run().trace, bound_share=0.84)}, "speed / the run's own bound"),
    ],
)
def test_each_target_can_be_missed_alone(changed: dict[str, object], what: str) -> None:
    assert set(verdicts(a_run()).values()) == {True}
    missed = [name for name, passed in verdicts(replace(a_run(), **changed)).items() if not passed]  # type: ignore[arg-type]
    assert missed == [what]


def test_table_aligns_its_columns_and_names_misses() -> None:
    lines = [at_least("a", "speed", 1.25, 1.3, " ×"), at_most("a", "bytes", 3, 4), Line("bb", "time", "2 s")]
    assert table(lines).splitlines() == [
        "a   speed  1.25 ×  ≥ 1.3 ×  FAIL",
        "a   bytes  3       ≤ 4      pass",
        "",
        "bb  time   2 s",
    ]
    assert "warm start: speed" in table(describe("1050 MiB", [a_run()], a_run()))


def test_stock_is_compared_or_its_failure_named() -> None:
    assert compare("c", [a_run()], {"tokens_per_second": 0.35}).measured == "0.35 tok/s (s2moe: 20 ×)"
    assert compare("c", [a_run()], {"error": "it ended with 137\n  log"}).measured == "it ended with 137"


def test_drive_reads_whole_aligned_blocks_past_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 8 * MIB)
    try:
        speed = Drive(path, block_bytes=100_000, n_threads=2).measure(4 * MIB)
    except OSError as error:
        pytest.skip(f"O_DIRECT is refused here: {error}")
    assert speed.block_bytes == 102_400
    assert speed.n_bytes == 4 * MIB // 102_400 * 102_400
    assert speed.bytes_per_second > 0


def test_drive_is_measured_under_the_read_limit_or_says_why_not(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 8 * MIB)
    read_limit = ReadLimit(32 * MIB, path)
    probe = subprocess.run(
        limited(["true"], 64 * MIB, None, keep_caches=True, read_limit=read_limit),
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode == EXIT_NO_LIMIT:
        pytest.skip(probe.stderr.strip().splitlines()[-1])
    speed = Drive(path, block_bytes=MIB, read_limit=read_limit).measure(24 * MIB)
    assert speed.read_limit_bytes_per_second == 32 * MIB
    assert 24 * MIB < speed.bytes_per_second < 48 * MIB
    missing = ReadLimit(32 * MIB, tmp_path / "missing")
    with pytest.raises(DriveError, match=r"ended with 125\n.*cannot set a read limit here: .*missing"):
        Drive(path, block_bytes=MIB, read_limit=missing).measure(24 * MIB)


def test_header_names_the_read_limit_and_a_drive_that_does_not_reach_it(tmp_path: Path) -> None:
    read_limit = ReadLimit(1024 * MIB, tmp_path)
    assert "throttled to 1 GiB/s" in drive_header(read_limit, [0.99, 1.02])
    assert "warning" not in drive_header(read_limit, [0.99, 1.02])
    assert "0.81 GiB/s at the slowest" in drive_header(read_limit, [1.0, 0.81])


def test_peak_of_the_own_process() -> None:
    assert MIB < peak_rss_bytes(os.getpid()) < 1 << 40
