"""Geometric means of ratios, with the interval of Student's t over their logarithms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_T_QUANTILES: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % of Student's t for 1 to 9 degrees of freedom (Abramowitz and Stegun, table 26.10)."""
_NORMAL_QUANTILE: Final = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A geometric mean and its 95 % interval."""

    ratio: float
    low: float | None
    """None: one pair says nothing about its own spread."""
    high: float | None
    n: int
    """Pairs; where two methods are compared, of the one with fewer."""

    def __str__(self) -> str:
        return f"{self:.2f}"

    def __format__(self, form: str) -> str:
        """`form` is that of the numbers."""
        if not form:
            return str(self)
        pairs = f"{self.n} pair" if self.n == 1 else f"{self.n} pairs"
        if self.low is None or self.high is None:
            return f"{self.ratio:{form}} ({pairs})"
        return f"{self.ratio:{form}} ({self.low:{form}} to {self.high:{form}}; {pairs})"


def estimate(ratios: Sequence[float]) -> Estimate | None:
    """Of ratios of pairs, each > 0. None: there are no pairs.

    The interval is mean ± t s / √n of the logarithms: as wide as few pairs demand, where resampling two of
    them would give no more than their range.
    """
    if not ratios:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    n = len(logs)
    if n == 1:
        return Estimate(ratios[0], None, None, 1)
    return _interval(statistics.fmean(logs), statistics.variance(logs) / n, n - 1, n)


def compare(one: Sequence[float], other: Sequence[float]) -> Estimate | None:
    """geomean(one) / geomean(other), with Welch's interval. None: one of them is empty.

    Degrees of freedom by Welch and Satterthwaite: (a + b)² / (a² / (n - 1) + b² / (m - 1)), where a and b are
    the variances of the two means.
    """
    if not one or not other:
        return None
    logs = [[math.log(ratio) for ratio in ratios] for ratios in (one, other)]
    mean = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    n = min(len(one), len(other))
    if n == 1:
        return Estimate(math.exp(mean), None, None, 1)
    variances = [statistics.variance(values) / len(values) for values in logs]
    spread = sum(v**2 / (len(values) - 1) for v, values in zip(variances, logs, strict=True))
    degrees = sum(variances) ** 2 / spread if spread > 0 else n - 1
    return _interval(mean, sum(variances), degrees, n)


def t_quantile(degrees: float) -> float:
    """97.5 % of Student's t. Fractions are rounded down, which widens the interval.

    From 10 degrees on by the expansion in 1 / degrees (Abramowitz and Stegun, 26.7.5), right to three places.
    """
    whole = max(1, math.floor(degrees))
    if whole <= len(_T_QUANTILES):
        return _T_QUANTILES[whole - 1]
    x = _NORMAL_QUANTILE
    terms: tuple[float, ...] = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return x + sum(term / float(whole) ** power for power, term in enumerate(terms, 1))


def _interval(mean: float, variance: float, degrees: float, n: int) -> Estimate:
    """`mean` and its variance are of logarithms."""
    half = t_quantile(degrees) * math.sqrt(variance)
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)
