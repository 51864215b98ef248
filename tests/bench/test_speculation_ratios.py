"""Geometric means and their intervals."""

from __future__ import annotations

import random
import statistics

import pytest

from s2moe.bench.speculation.ratios import compare, estimate


def test_the_mean_is_geometric_so_that_halves_and_doubles_cancel() -> None:
    found = estimate([0.5, 2.0])
    assert found is not None
    assert found.ratio == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_interval() -> None:
    ratios = [1.0, 1.3, 0.9, 1.6, 1.1]
    assert estimate(ratios) == estimate(ratios)
    assert estimate(ratios) != estimate(ratios, seed=1)


def test_the_interval_holds_the_mean_and_narrows_with_more_pairs() -> None:
    ratios = [1.0, 1.3, 0.9, 1.6, 1.1]
    few, many = estimate(ratios), estimate(ratios * 20)
    assert few is not None
    assert many is not None
    assert few.low is not None
    assert few.high is not None
    assert many.low is not None
    assert many.high is not None
    assert few.low < few.ratio < few.high
    assert many.high - many.low < 0.5 * (few.high - few.low)
    assert str(few) == f"{few.ratio:.2f} ({few.low:.2f} to {few.high:.2f})"


def test_the_interval_of_many_pairs_is_that_of_the_normal_distribution() -> None:
    generator = random.Random(1)
    logs = [generator.gauss(0.3, 0.2) for _ in range(400)]
    found = estimate([2.718281828459045**log for log in logs])
    assert found is not None
    error = 1.96 * statistics.stdev(logs) / 20
    assert found.low == pytest.approx(found.ratio * 2.718281828459045**-error, rel=0.01)
    assert found.high == pytest.approx(found.ratio * 2.718281828459045**error, rel=0.01)


def test_one_pair_has_no_interval_and_none_no_mean() -> None:
    found = estimate([1.25])
    assert found is not None
    assert (found.ratio, found.low, found.high) == (pytest.approx(1.25), None, None)
    assert str(found) == "1.25"
    assert estimate([]) is None


def test_two_methods_are_compared_by_the_ratio_of_their_means() -> None:
    found = compare([2.0, 2.2, 1.8, 2.0], [1.0, 1.1, 0.9, 1.0])
    assert found is not None
    assert found.ratio == pytest.approx(2.0)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 2.0 < found.high
    assert compare([], [1.0]) is None
    single = compare([2.0], [1.0])
    assert single is not None
    assert single.low is None
