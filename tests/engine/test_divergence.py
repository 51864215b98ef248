"""The figures of a comparison are those that their definitions give."""

from __future__ import annotations

import math

import numpy as np
import pytest

from s2moe.engine.divergence import Divergence, Rows, log_softmax


def logits_of(*probabilities: list[float]) -> np.ndarray:
    """Rows of logits, each shifted by a constant of its own, which must not matter."""
    rows = np.log(np.array(probabilities)) + np.arange(len(probabilities))[:, None]
    return rows.astype(np.float32)


REFERENCE = logits_of([0.5, 0.25, 0.25], [0.8, 0.1, 0.1], [0.2, 0.2, 0.6])
OTHER = logits_of([0.25, 0.5, 0.25], [0.8, 0.1, 0.1], [0.1, 0.2, 0.7])
TOKENS = [0, 1, 2]


def test_rows_are_the_definitions() -> None:
    rows = Rows.compare(REFERENCE, OTHER, TOKENS)
    assert rows.kl == pytest.approx(
        [
            0.5 * math.log(2) - 0.25 * math.log(2),
            0.0,
            0.2 * math.log(2) + 0.6 * math.log(0.6 / 0.7),
        ],
        abs=1e-6,
    )
    assert rows.delta_p == pytest.approx([-0.25, 0.0, 0.1], abs=1e-6)
    assert rows.overlap == pytest.approx([0.75, 1.0, 0.9], abs=1e-6)
    assert rows.same_top1.tolist() == [False, True, True]
    assert rows.reference_loss == pytest.approx(-np.log([0.5, 0.1, 0.6]), abs=1e-6)
    assert rows.other_loss == pytest.approx(-np.log([0.25, 0.1, 0.7]), abs=1e-6)


def test_summary_of_rows() -> None:
    found = Divergence.of(Rows.compare(REFERENCE, OTHER, TOKENS))
    assert found is not None
    assert found.n_rows == 3
    assert found.rms_delta_p == pytest.approx(math.sqrt((0.0625 + 0.01) / 3), abs=1e-6)
    assert found.same_top1 == pytest.approx(2 / 3)
    assert found.same_top1_error == pytest.approx(1.96 * math.sqrt(2 / 9 / 3))
    assert found.reference_perplexity == pytest.approx((0.5 * 0.1 * 0.6) ** (-1 / 3), rel=1e-6)
    assert found.perplexity_ratio == pytest.approx((0.5 * 0.6 / (0.25 * 0.7)) ** (1 / 3), rel=1e-6)
    assert found.perplexity == pytest.approx(found.reference_perplexity * found.perplexity_ratio)


def test_the_same_logits_differ_in_nothing() -> None:
    logits = np.random.default_rng(1).normal(0, 8, (20, 500)).astype(np.float32)
    found = Divergence.of(Rows.compare(logits, logits.copy(), [7] * 20))
    assert found is not None
    assert (found.mean_kl, found.rms_delta_p, found.same_top1, found.perplexity_ratio) == (0, 0, 1, 1)


def test_selected_and_joined_rows() -> None:
    whole = Rows.compare(REFERENCE, OTHER, TOKENS)
    parts = [Rows.compare(REFERENCE[[row]], OTHER[[row]], [TOKENS[row]]) for row in range(3)]
    joined = Rows.concatenate(parts)
    assert joined.kl.tolist() == whole.kl.tolist()
    picked = joined.select(np.array([True, False, True]))
    assert picked.delta_p.tolist() == whole.delta_p[[0, 2]].tolist()
    assert Divergence.of(whole.select(np.zeros(3, dtype=bool))) is None


def test_forbidden_tokens_and_large_logits_stay_finite() -> None:
    reference = np.array([[1000.0, 999.0, -np.inf]], dtype=np.float32)
    rows = Rows.compare(reference, reference, [0])
    assert rows.kl.tolist() == [0.0]
    assert np.exp(log_softmax(reference)).sum() == pytest.approx(1)
