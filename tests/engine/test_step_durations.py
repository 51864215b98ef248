"""How long steps took: buckets, and those of the library with those of the engine."""

from __future__ import annotations

import pytest

from s2moe.engine.messages import STEP_DURATION_BOUNDS_SECONDS, StepDurations
from s2moe.engine.step_durations import StepDurationCounter, durations_of_report

N_BUCKETS = len(STEP_DURATION_BOUNDS_SECONDS) + 1


def counted(*seconds: float) -> StepDurations:
    counter = StepDurationCounter()
    for each in seconds:
        counter.add(each)
    return counter.result()


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (0.002, 0), (0.0021, 1), (2.5, N_BUCKETS - 2), (9.0, N_BUCKETS - 1)]
)
def test_bound_belongs_to_the_bucket_below_it(seconds: float, bucket: int) -> None:
    counts = [0] * N_BUCKETS
    counts[bucket] = 1
    assert counted(seconds) == StepDurations(counts=counts, seconds=seconds)


def test_what_went_past_the_speculator_is_added_to_its_own() -> None:
    own = {
        "draft": {"counts": [1] * N_BUCKETS, "seconds": 1.0},
        "plain": {"counts": [2] * N_BUCKETS, "seconds": 2.0},
    }
    found = durations_of_report({"step_durations": own}, counted(0.001))
    assert found["draft"] == StepDurations(counts=[1] * N_BUCKETS, seconds=1.0)
    assert found["plain"] == StepDurations(counts=[3, *[2] * (N_BUCKETS - 1)], seconds=2.001)


def test_report_without_them_leaves_the_engines_own() -> None:
    assert durations_of_report({}, counted(0.5)) == {"plain": counted(0.5)}
