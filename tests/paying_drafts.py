"""What a speculator would have learnt on a machine where drafts pay, whatever they do."""

from __future__ import annotations

import json
from typing import Any

SINGLE_SECONDS = 5e5
"""Of a token without drafts: stays far above all else for as long as a test takes, though it is averaged with
what is measured."""
COSTS = (1e-6, 1e-9, 1e-12, 1e-12)
"""Seconds of a verification, of each row, expert in memory and missing expert of it."""
N_KINDS = 12
WEIGHT = 1e90
"""Of the costs: what is observed in thousands of steps does not move them."""


def with_paying_drafts(state: bytes) -> bytes:
    """`state`: of s2moe_speculator_state(). All regimes in it then admit as many drafts as limits allow, the
    likeliest first, so that trees branch, and the controller drafts in all steps but every 32nd."""
    learnt: dict[str, Any] = json.loads(state)
    learnt["verify"] = _verify_costs(len(learnt["verify"]))
    for regime in learnt["regimes"].values():
        assert len(regime["means"]) == 4
        regime["means"] = [1e-3, SINGLE_SECONDS, 1.0, 1.0]
        # the last record, of plain steps: their number, tokens, seconds, and squares of deviations
        regime["controller"][-4:] = [100.0, 100.0, 100 * SINGLE_SECONDS, 1.0]
    return json.dumps(learnt).encode()


def _verify_costs(n_numbers: int) -> list[float]:
    """A state of the cost model: observations that pin the coefficients in units of the prior to 1."""
    identity = [WEIGHT if i == j else 0.0 for i in range(4) for j in range(4)]
    kind = [WEIGHT, *[WEIGHT] * 4, *identity]
    # version, observations (of all, of single rows, of several), seconds of the first, usual residual
    numbers = [1.0, 1000.0, 500.0, 500.0, 1.0, WEIGHT, *COSTS, *kind * N_KINDS]
    assert len(numbers) == n_numbers, "the cost model's numbers are not those that this was written for"
    return numbers
