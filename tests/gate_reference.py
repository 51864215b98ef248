"""The reuse gate in numpy: which experts the rows of a verification use, written down from the rule alone.

Shapes: scores, weights [n_rows, n_expert]; residency [n_expert]; prefixes, allowances [n_rows].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]
Scores = npt.NDArray[np.float64]
ABSENT = 0


@dataclass(frozen=True)
class GateSettings:
    """As s2moe_speculator_begin() takes them."""

    budget: float = 0.05
    strength: float = 1.0
    residency_weight: float = 0.5
    cap: int = 0
    """Experts in use that attract others; 0 = 2 k."""
    single_token_bias: bool = False


@dataclass(frozen=True)
class Router:
    """What a layer's router says of the rows, and how to read it."""

    k: int
    scores: FloatArray
    """What the top-k is taken of; −inf or no number: may not be chosen."""
    weights: FloatArray
    """What mixing weights are taken from."""
    scores_are_probabilities: bool = True
    weights_are_logits: bool = False

    @property
    def logits(self) -> Scores:
        scores = self.scores.astype(np.float64)
        if not self.scores_are_probabilities:
            return scores
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(scores > 0, np.log(scores), -np.inf)

    @property
    def mixing(self) -> Scores:
        """Mixing weights, but for a factor of each row."""
        weights = self.weights.astype(np.float64)
        if self.weights_are_logits:
            with np.errstate(invalid="ignore"):
                return np.exp(weights - np.fmax.reduce(weights, axis=1, keepdims=True))
        return weights


@dataclass(frozen=True)
class Choice:
    """Of one row."""

    exact: list[int]
    """The router's experts, best first."""
    chosen: set[int]
    displaced: float
    """Share of the chosen experts' mixing weights that is on experts which the router did not choose."""


def top(values: Scores, k: int) -> list[int]:
    """The k largest that are not −inf, best first; of equal ones the first."""
    order = [int(i) for i in np.argsort(-values, kind="stable") if values[i] > -np.inf]
    return order[:k]


def margins(router: Router) -> list[float]:
    """By how much each row's best expert leads the best one that is not chosen; 0 where that says nothing."""
    result = []
    for row, weights in zip(router.logits, router.mixing, strict=True):
        best = top(row, router.k + 1)
        with np.errstate(invalid="ignore"):
            margin = float(row[best[0]] - row[best[-1]]) if len(best) > router.k else 0.0
        result.append(margin if np.isfinite(margin) and np.isfinite(weights).all() else 0.0)
    return result


def reused_set(
    settings: GateSettings, router: Router, residency: npt.NDArray[np.uint8], prefixes: Scores
) -> set[int]:
    """E*: the experts that rows are bent towards."""
    logits = router.logits
    allowed = logits > -np.inf
    weight = (prefixes[:, None] * allowed).sum(axis=0)
    with np.errstate(invalid="ignore"):
        total = (prefixes[:, None] * np.where(allowed, logits, 0)).sum(axis=0)
    present = residency != ABSENT
    with np.errstate(divide="ignore", invalid="ignore"):
        attraction = np.where(weight > 0, total / weight, -np.inf)
    attraction = attraction + settings.residency_weight * float(np.median(margins(router))) * present
    reused = set(top(attraction, max(router.k, settings.cap or 2 * router.k)))
    return reused | set(np.flatnonzero(present).tolist()) if settings.single_token_bias else reused


def choose_experts(
    settings: GateSettings,
    router: Router,
    residency: npt.NDArray[np.uint8],
    prefixes: Scores,
    allowances: Scores,
) -> list[Choice]:
    logits, mixing = router.logits, router.mixing
    present = residency != ABSENT
    gated = settings.budget > 0 and settings.strength > 0 and (len(logits) > 1 or settings.single_token_bias)
    reused = reused_set(settings, router, residency, prefixes)
    used_before: set[int] = set()
    choices = []
    for b, margin in enumerate(margins(router)):
        exact = top(logits[b], router.k)
        doubt = np.full(logits.shape[1], 1 - prefixes[b])
        if settings.single_token_bias:
            doubt[present] = 1
        pull = settings.strength * doubt * margin
        bent = logits[b] + np.where([e in reused for e in range(len(present))], pull, 0)
        cost = np.where([e in used_before for e in range(len(present))], 0, np.where(present, 1, 2))
        chosen = set(exact)
        if gated:
            # expensive experts give way first, of equally expensive ones the least wanted
            for leaving in sorted(exact, key=lambda e: (-cost[e], -exact.index(e))):
                candidates = [
                    e for e in sorted(reused - chosen) if cost[e] < cost[leaving] and logits[b][e] > -np.inf
                ]
                if not candidates:
                    continue
                entering = max(candidates, key=lambda e: (logits[b][e], -e))
                changed = chosen - {leaving} | {entering}
                if (
                    bent[entering] > bent[leaving]
                    and displaced_share(mixing[b], changed, exact) <= allowances[b]
                ):
                    chosen = changed
        used_before |= chosen
        choices.append(Choice(exact, chosen, displaced_share(mixing[b], chosen, exact)))
    return choices


def displaced_share(mixing: Scores, chosen: set[int], exact: list[int]) -> float:
    total = sum(float(mixing[e]) for e in chosen)
    strange = sum(float(mixing[e]) for e in chosen if e not in exact)
    if not strange:
        return 0.0
    return strange / total if total > 0 else 1.0
