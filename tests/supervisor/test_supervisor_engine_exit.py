from __future__ import annotations

from pathlib import Path

import pytest

from s2moe.server.engine_exit import Condemnation, EngineExit, OomKillCounter


@pytest.mark.parametrize(
    ("engine_exit", "reason", "summary"),
    [
        (EngineExit(-9), "crash", "engine killed by signal 9 (SIGKILL)"),
        (
            EngineExit(-9, oom_killed=True),
            "oom",
            "engine killed by signal 9 (SIGKILL) because the machine ran out of memory",
        ),
        (EngineExit(-11), "crash", "engine killed by signal 11 (SIGSEGV)"),
        (EngineExit(-11, oom_killed=True), "crash", "engine killed by signal 11 (SIGSEGV)"),
        (EngineExit(1), "crash", "engine exited with code 1"),
        (EngineExit(1, stderr_tail=("mmap: ENOMEM",)), "oom", "engine exited with code 1 (out of memory)"),
        (
            EngineExit(1, stderr_tail=("CUDA error: out of memory",)),
            "oom",
            "engine exited with code 1 (out of memory)",
        ),
        (EngineExit(1, stderr_tail=("memory: 3 GB",)), "crash", "engine exited with code 1"),
        (EngineExit(0), "crash", "engine exited with code 0 although nobody asked it to"),
        (EngineExit(-9, Condemnation("hang", "engine hung")), "hang", "engine hung"),
        (EngineExit(-9, Condemnation("crash", "broken frame"), oom_killed=True), "crash", "broken frame"),
        (EngineExit(1, fatal_message="no file"), "crash", "engine could not start: no file"),
        (EngineExit(None), "crash", "engine could not be started"),
    ],
)
def test_reason_and_summary(engine_exit: EngineExit, reason: str, summary: str) -> None:
    assert engine_exit.reason == reason
    assert engine_exit.summary == summary


def test_report_is_one_line_with_the_end_of_stderr() -> None:
    report = EngineExit(1, stderr_tail=(*(f"line {i}" for i in range(40)), "", "y" * 5000)).report
    assert report.startswith("engine exited with code 1; its last words: ")
    assert report.endswith("y" * 100)
    assert "\n" not in report
    assert len(report) < 1700
    assert "line 33 | line 34" in EngineExit(1, stderr_tail=tuple(f"line {i}" for i in range(35))).report


def test_oom_counter_reads_the_first_source_that_exists(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free 5\noom_kill 2\noom_kill_other 9\n")
    counter = OomKillCounter((tmp_path / "absent", vmstat))
    assert counter.read() == 2
    vmstat.write_text("oom_kill 3\n")
    assert counter.read() == 3
    vmstat.unlink()
    assert counter.read() == 0
    assert OomKillCounter(()).read() == 0


def test_oom_counter_finds_a_source_on_this_machine() -> None:
    if not Path("/proc/vmstat").is_file():
        pytest.skip("no /proc/vmstat here")
    assert OomKillCounter().read() >= 0
