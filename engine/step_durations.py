"""How long the steps of an answer took, by bucket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from s2moe.engine.messages import STEP_DURATION_BOUNDS_SECONDS, StepDurations


class StepDurationCounter:
    """Counts evaluations of one kind. One answer, one thread."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_DURATION_BOUNDS_SECONDS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(STEP_DURATION_BOUNDS_SECONDS, seconds)] += 1
        self._seconds += seconds

    def result(self) -> StepDurations:
        return StepDurations(counts=list(self._counts), seconds=self._seconds)


def durations_of_report(report: Mapping[str, Any], plain: StepDurations) -> dict[str, StepDurations]:
    """Those of s2moe_speculator_report(), and of the answer's evaluations that went past the speculator."""
    found = {
        phase: StepDurations(counts=durations["counts"], seconds=durations["seconds"])
        for phase, durations in report.get("step_durations", {}).items()
    }
    if "plain" not in found:
        return {**found, "plain": plain}
    own = found["plain"]
    counts = [a + b for a, b in zip(own.counts, plain.counts, strict=True)]
    return {**found, "plain": StepDurations(counts=counts, seconds=own.seconds + plain.seconds)}
