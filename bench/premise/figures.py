"""What drafts predict against what the target does: counts of experts, and divergence by decode step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from s2moe.engine.divergence import Rows

Ids = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class RoutingCounts:
    """How often the target chose the expert that a prediction ranks r-th, by layer and draft depth.

    Depth 0 is the root, whose routing is a prediction too: the draft evaluates it with fewer experts.
    """

    def __init__(self, n_layer: int, n_depth: int, k: int) -> None:
        self.k = k
        self._hits: Counts = np.zeros((n_layer, n_depth, k), dtype=np.int64)
        self._n_predicted: Counts = np.zeros((n_layer, n_depth, k), dtype=np.int64)
        self._n_actual: Counts = np.zeros((n_layer, n_depth), dtype=np.int64)

    def add(self, predicted: Ids, actual: Ids) -> None:
        """Both [n_layer, n_depth, k], the best expert first, negative where nothing was routed."""
        is_valid = (predicted >= 0) & (actual >= 0).any(axis=-1, keepdims=True)
        is_hit = is_valid & (predicted[..., :, None] == actual[..., None, :]).any(axis=-1)
        self._hits += is_hit
        self._n_predicted += is_valid
        self._n_actual += np.where(is_valid.any(axis=-1), (actual >= 0).sum(axis=-1), 0)

    @property
    def layers(self) -> list[int]:
        """Those where something was predicted."""
        return [int(layer) for layer in np.flatnonzero(self._n_actual.sum(axis=-1))]

    def precision(self, n_best: int, *, by_layer: bool, depths: slice) -> FloatArray:
        """Share of the n_best experts of a prediction that the target chose.

        [len(layers)] if by_layer, else one value per depth; NaN where nothing was predicted.
        """
        hits, predicted = self._hits[:, depths, :n_best], self._n_predicted[:, depths, :n_best]
        axes = (1, 2) if by_layer else (0, 2)
        return self._over(hits.sum(axis=axes), predicted.sum(axis=axes), by_layer=by_layer)

    def recall(self, n_best: int, *, by_layer: bool, depths: slice) -> FloatArray:
        """Share of the target's experts that are among the n_best of a prediction; shapes as precision()."""
        hits, actual = self._hits[:, depths, :n_best], self._n_actual[:, depths]
        return self._over(
            hits.sum(axis=(1, 2) if by_layer else (0, 2)),
            actual.sum(axis=1 if by_layer else 0),
            by_layer=by_layer,
        )

    def _over(self, part: Counts, whole: Counts, *, by_layer: bool) -> FloatArray:
        values: FloatArray = np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)
        return values[self.layers] if by_layer else values


@dataclass
class StepFigures:
    """A draft against the target, by decode step: [n_starts][n_steps] each."""

    kl: list[FloatArray] = field(default_factory=list)
    overlap: list[FloatArray] = field(default_factory=list)
    is_match: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    def add(self, rows: Rows) -> None:
        """The steps of one start, in order."""
        self.kl.append(rows.kl)
        self.overlap.append(rows.overlap)
        self.is_match.append(rows.same_top1)

    @property
    def mean_kl(self) -> FloatArray:
        """[n_steps], nats"""
        return _means(self.kl)

    @property
    def greedy_acceptance(self) -> FloatArray:
        """[n_steps], given that all drafts before were accepted: the text is the target's."""
        return _means(self.is_match)

    @property
    def sampled_acceptance(self) -> FloatArray:
        """[n_steps] Σ min(p, q): what exact speculative sampling accepts at temperature 1."""
        return _means(self.overlap)

    @property
    def greedy_length(self) -> float:
        """Mean number of leading steps that match."""
        return float(np.cumprod(np.stack(self.is_match), axis=1).sum(axis=1).mean())

    @property
    def sampled_length(self) -> float:
        """Expected number of leading drafts that are accepted at temperature 1."""
        return float(np.cumprod(np.stack(self.overlap), axis=1).sum(axis=1).mean())

    def to_json(self) -> dict[str, Any]:
        return {
            "n_starts": len(self.kl),
            "mean_kl": self.mean_kl.tolist(),
            "greedy_acceptance": self.greedy_acceptance.tolist(),
            "sampled_acceptance": self.sampled_acceptance.tolist(),
            "greedy_length": self.greedy_length,
            "sampled_length": self.sampled_length,
        }


@dataclass
class DraftFigures:
    """Everything about drafts with one number of experts."""

    n_experts: int
    own: RoutingCounts
    """Predictions from the draft's routing of the token itself, its best k."""
    parent: RoutingCounts
    """From its routing of the token before; nothing at depth 0."""
    shared: StepFigures = field(default_factory=StepFigures)
    independent: StepFigures = field(default_factory=StepFigures)

    @classmethod
    def create(cls, n_experts: int, *, n_layer: int, n_depth: int, k: int) -> DraftFigures:
        return cls(n_experts, RoutingCounts(n_layer, n_depth, k), RoutingCounts(n_layer, n_depth, k))

    def add_routing(self, predicted: Ids, actual: Ids) -> None:
        """Both [n_layer, n_depth, k], depth 0 the root."""
        self.own.add(predicted, actual)
        of_parent = np.full_like(predicted, -1)
        of_parent[:, 1:] = predicted[:, :-1]
        self.parent.add(of_parent, actual)

    def to_json(self) -> dict[str, Any]:
        return {
            "draft_experts": self.n_experts,
            "layers": self.own.layers,
            "routing": {
                "own": _routing_json(self.own, self.own.k),
                "parent": _routing_json(self.parent, self.own.k),
                "own_used": _routing_json(self.own, self.n_experts),
            },
            "shared": self.shared.to_json(),
            "independent": self.independent.to_json(),
        }


def _routing_json(counts: RoutingCounts, n_best: int) -> dict[str, Any]:
    """Layers without the root, which is no draft."""
    drafts = slice(1, None)
    return {
        "n_best": n_best,
        "precision_by_depth": _finite(counts.precision(n_best, by_layer=False, depths=slice(None))),
        "recall_by_depth": _finite(counts.recall(n_best, by_layer=False, depths=slice(None))),
        "precision_by_layer": _finite(counts.precision(n_best, by_layer=True, depths=drafts)),
        "recall_by_layer": _finite(counts.recall(n_best, by_layer=True, depths=drafts)),
    }


def _means(starts: list[FloatArray] | list[npt.NDArray[np.bool_]]) -> FloatArray:
    means: FloatArray = np.stack(starts).mean(axis=0)
    return means


def _finite(values: FloatArray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
