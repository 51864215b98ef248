"""Geometric means of ratios, with the interval that resampling gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

N_RESAMPLES: Final = 4000
_PERCENTILES: Final = (2.5, 97.5)


@dataclass(frozen=True)
class Estimate:
    """A geometric mean and its 95 % interval."""

    ratio: float
    low: float | None
    """None: one pair says nothing about its own spread."""
    high: float | None
    n: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.ratio:.2f}"
        return f"{self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})"


def estimate(ratios: Sequence[float], *, seed: int = 0) -> Estimate | None:
    """Of ratios of pairs, each > 0: percentile bootstrap over the pairs. None: there are no pairs.

    With few pairs (below about ten) such an interval is known to be too narrow.
    """
    if not ratios:
        return None
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    point = float(np.exp(logs.mean()))
    if len(ratios) == 1:
        return Estimate(point, None, None, 1)
    low, high = np.exp(np.percentile(_resampled_means(logs, seed), _PERCENTILES))
    return Estimate(point, float(low), float(high), len(ratios))


def compare(one: Sequence[float], other: Sequence[float], *, seed: int = 0) -> Estimate | None:
    """geomean(one) / geomean(other), both resampled on their own. None: one of them is empty."""
    if not one or not other:
        return None
    logs = [np.log(np.asarray(ratios, dtype=np.float64)) for ratios in (one, other)]
    point = float(np.exp(logs[0].mean() - logs[1].mean()))
    n = min(len(one), len(other))
    if n == 1:
        return Estimate(point, None, None, 1)
    difference = _resampled_means(logs[0], seed) - _resampled_means(logs[1], seed + 1)
    low, high = np.exp(np.percentile(difference, _PERCENTILES))
    return Estimate(point, float(low), float(high), n)


def _resampled_means(values: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.float64]:
    """[N_RESAMPLES] means of samples of the same size, drawn with replacement."""
    choices = np.random.default_rng(seed).integers(len(values), size=(N_RESAMPLES, len(values)))
    means: npt.NDArray[np.float64] = values[choices].mean(axis=1)
    return means
