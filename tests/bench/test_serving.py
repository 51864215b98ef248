"""What the benchmarks tell when a server does not start."""

from __future__ import annotations

from s2moe.bench.serving import end_of_log

ACCESS = "2026-01-31T12:00:00.123Z INFO s2moe.server.access request method=GET route=/health status=503\n"


def test_polls_of_health_do_not_hide_the_reason() -> None:
    log = "first\n" + 9 * ACCESS + "s2moe: error: engine could not start: too small\n" + 99 * ACCESS
    assert end_of_log(log) == ["first", "s2moe: error: engine could not start: too small"]


def test_only_the_end_is_told() -> None:
    assert end_of_log("\n".join(map(str, range(9)))) == ["4", "5", "6", "7", "8"]
