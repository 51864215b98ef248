"""How long requests take, and so when it is worth to try again."""

from __future__ import annotations

import math
from typing import Final

_EWMA_WEIGHT: Final = 0.3
_LONGEST_RETRY_SECONDS: Final = 120


class ServiceTime:
    """Mean of measured times, in which the latest count most."""

    def __init__(self, guess_seconds: float = 0.0) -> None:
        """`guess_seconds`: for as long as nothing is measured."""
        self._mean_seconds = guess_seconds
        self._is_measured = False

    def measure(self, seconds: float) -> None:
        weight = _EWMA_WEIGHT if self._is_measured else 1.0
        self._is_measured = True
        self._mean_seconds += weight * (seconds - self._mean_seconds)

    def retry_after_seconds(self, elapsed_seconds: float = 0.0) -> int:
        """Until a request that has run for `elapsed_seconds` should be done: 1 to 120."""
        rest_seconds = self._mean_seconds - elapsed_seconds
        return min(_LONGEST_RETRY_SECONDS, max(1, math.ceil(rest_seconds)))
