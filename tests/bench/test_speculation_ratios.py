"""Geometric means and their intervals."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from s2moe.bench.speculation.ratios import compare, estimate, t_quantile


def test_the_mean_is_geometric_so_that_halves_and_doubles_cancel() -> None:
    found = estimate([0.5, 2.0])
    assert found is not None
    assert found.ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.706), (2, 4.303), (9, 2.262), (10, 2.228), (11, 2.201), (15, 2.131), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=6e-4)
    assert t_quantile(degrees + 0.9) == t_quantile(degrees), "a fraction does not narrow the interval"


def test_two_pairs_give_a_far_wider_interval_than_their_range() -> None:
    found = estimate([1.0, 1.1])
    assert found is not None
    half = 12.706 * math.log(1.1) / 2
    assert found.low == pytest.approx(found.ratio * math.exp(-half), rel=1e-4)
    assert found.high == pytest.approx(found.ratio * math.exp(half), rel=1e-4)


def test_the_interval_holds_the_truth_as_often_as_it_says_with_few_pairs_too() -> None:
    generator = random.Random(3)
    for n in (2, 4):
        n_held = 0
        for _ in range(2000):
            found = estimate([math.exp(generator.gauss(0.1, 0.2)) for _ in range(n)])
            assert found is not None
            assert found.low is not None
            assert found.high is not None
            n_held += found.low <= math.exp(0.1) <= found.high
        assert n_held / 2000 == pytest.approx(0.95, abs=0.015), n


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
    assert str(few) == f"{few.ratio:.2f} ({few.low:.2f} to {few.high:.2f}; 5 pairs)"


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
    assert str(found) == "1.25 (1 pair)"
    assert estimate([]) is None


def test_two_methods_are_compared_by_the_ratio_of_their_means() -> None:
    found = compare([2.0, 2.2, 1.8, 2.0], [1.0, 1.1, 0.9, 1.0])
    assert found is not None
    assert found.ratio == pytest.approx(2.0)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 2.0 < found.high
    assert compare([], [1.0]) is None
    single = compare([2.0], [1.0, 1.1])
    assert single is not None
    assert single.low is None


def test_the_interval_of_two_methods_is_welchs() -> None:
    one, other = [0.1, 0.2, 0.4, 0.3, 0.25], [0.0, 0.05, 0.1]
    found = compare([math.exp(log) for log in one], [math.exp(log) for log in other])
    assert found is not None
    assert found.low is not None
    # variances of the means .0025 and .000833: 5.68 degrees of freedom, rounded down to 5
    half = 2.571 * math.sqrt(0.0025 + 0.05**2 / 3)
    assert found.low == pytest.approx(math.exp(0.2 - half), rel=1e-4)
    assert found.n == 3
