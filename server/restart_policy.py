"""When a failed engine is started again, and when the supervisor gives up. Pure: time is passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartLimits:
    first_backoff_seconds: float = 0.1
    """Wait before the first restart; doubles with every further failure."""
    max_backoff_seconds: float = 5.0
    healthy_after_seconds: float = 60.0
    """An engine that was ready for this long starts again with the first backoff."""
    max_failures: int = 5
    """Give up at this many failures within the window, or at this many starts in a row that never got ready
    (a load that takes minutes and fails would otherwise be repeated forever)."""
    window_seconds: float = 60.0


class RestartPolicy:
    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._failures: deque[float] = deque()
        self._failed_starts = 0
        self._consecutive = 0

    def on_failure(self, now: float, *, ready_seconds: float | None) -> float | None:
        """Records a failure at `now` (monotonic seconds) of an engine that had been ready for `ready_seconds`
        (None: it never got ready).

        Returns the backoff in seconds before the next start, or None to give up.
        """
        limits = self._limits
        if ready_seconds is not None and ready_seconds >= limits.healthy_after_seconds:
            self._consecutive = 0
        self._consecutive += 1
        self._failed_starts = self._failed_starts + 1 if ready_seconds is None else 0
        self._failures.append(now)
        while now - self._failures[0] > limits.window_seconds:
            self._failures.popleft()
        if max(len(self._failures), self._failed_starts) >= limits.max_failures:
            return None
        # The exponent is capped too: 2.0**1024 overflows.
        doublings = min(self._consecutive - 1, 64)
        return min(limits.max_backoff_seconds, limits.first_backoff_seconds * 2.0**doublings)

    @property
    def verdict(self) -> str:
        """Says which limit was reached, after `on_failure` returned None."""
        if len(self._failures) >= self._limits.max_failures:
            return f"{len(self._failures)} failures within {self._limits.window_seconds:g} s"
        return f"{self._failed_starts} failed starts in a row"
