from __future__ import annotations

from s2moe.server.restart_policy import RestartLimits, RestartPolicy


def test_backoff_doubles_up_to_its_cap() -> None:
    policy = RestartPolicy(RestartLimits(max_failures=1000))
    backoffs = [policy.on_failure(float(i), ready_seconds=1.0) for i in range(9)]
    assert backoffs == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_backoff_stays_at_its_cap_for_thousands_of_failures() -> None:
    policy = RestartPolicy(RestartLimits(max_failures=10_000))
    assert {policy.on_failure(i * 1.0, ready_seconds=1.0) for i in range(3000)} >= {5.0}


def test_a_healthy_minute_resets_the_backoff() -> None:
    policy = RestartPolicy(RestartLimits())
    assert [policy.on_failure(i * 1.0, ready_seconds=0.5) for i in range(3)] == [0.1, 0.2, 0.4]
    assert policy.on_failure(61.9, ready_seconds=59.9) == 0.8
    assert policy.on_failure(130.0, ready_seconds=60.0) == 0.1


def test_five_failures_within_the_window_are_too_many() -> None:
    policy = RestartPolicy(RestartLimits())
    times = [0.0, 15.0, 30.0, 45.0, 60.0]
    backoffs = [policy.on_failure(now, ready_seconds=1.0) for now in times]
    assert None not in backoffs[:4]
    assert backoffs[4] is None
    assert policy.verdict == "5 failures within 60 s"


def test_failures_that_left_the_window_are_forgotten() -> None:
    policy = RestartPolicy(RestartLimits())
    assert None not in [policy.on_failure(i * 15.1, ready_seconds=10.0) for i in range(50)]


def test_slow_starts_that_always_fail_are_given_up_although_far_apart() -> None:
    policy = RestartPolicy(RestartLimits())
    backoffs = [policy.on_failure(i * 300.0, ready_seconds=None) for i in range(5)]
    assert None not in backoffs[:4]
    assert backoffs[4] is None
    assert policy.verdict == "5 failed starts in a row"


def test_a_start_that_got_ready_breaks_the_row_of_failed_ones() -> None:
    policy = RestartPolicy(RestartLimits())
    ready = [None, None, None, None, 1.0, None, None, None, None]
    assert None not in [policy.on_failure(i * 300.0, ready_seconds=r) for i, r in enumerate(ready)]
