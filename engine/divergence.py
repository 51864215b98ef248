"""How far predictions are from a reference's at the same positions: KL divergence, Δp, top-1, perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_CONFIDENCE_95 = 1.96


@dataclass(frozen=True)
class Rows:
    """One value per compared position, each array [n_rows]."""

    kl: FloatArray
    """KL(reference ‖ other) in nats."""
    delta_p: FloatArray
    """Probability of the text's token, other less reference."""
    overlap: FloatArray
    """Σ min(p, q): with this probability a token drawn from one passes for one of the other."""
    same_top1: BoolArray
    """Whether both find the same token most probable."""
    reference_loss: FloatArray
    """−log probability of the text's token."""
    other_loss: FloatArray

    @classmethod
    def compare(
        cls,
        reference: npt.NDArray[np.float32],
        other: npt.NDArray[np.float32],
        tokens: Sequence[int] | npt.NDArray[np.int64],
    ) -> Self:
        """Logits [n_rows, n_vocab] of both, and [n_rows] the token that follows in the text."""
        reference_log, other_log = log_softmax(reference), log_softmax(other)
        p, q = np.exp(reference_log), np.exp(other_log)
        # a token that the reference forbids adds nothing, whatever the other thinks of it
        with np.errstate(invalid="ignore"):
            terms = np.where(p > 0, p * (reference_log - other_log), 0.0)
        rows = np.arange(len(tokens))
        chosen = np.asarray(tokens, dtype=np.int64)
        return cls(
            kl=np.maximum(terms.sum(axis=-1), 0.0),
            delta_p=q[rows, chosen] - p[rows, chosen],
            overlap=np.minimum(p, q).sum(axis=-1),
            same_top1=reference.argmax(axis=-1) == other.argmax(axis=-1),
            reference_loss=-reference_log[rows, chosen],
            other_loss=-other_log[rows, chosen],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """At least one part."""
        names = cls.__dataclass_fields__
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def select(self, mask: BoolArray) -> Self:
        """The rows where mask [n_rows] is true."""
        return type(self)(**{name: getattr(self, name)[mask] for name in self.__dataclass_fields__})

    def __len__(self) -> int:
        return len(self.kl)


@dataclass(frozen=True)
class Divergence:
    """Rows in a few numbers."""

    n_rows: int
    mean_kl: float
    rms_delta_p: float
    """Root mean square of Δp, 0 … 1; llama-perplexity prints it in percent."""
    same_top1: float
    """Share of rows, 0 … 1."""
    same_top1_error: float
    """Half the width of its 95 % interval, as if rows were independent of each other."""
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: float

    @classmethod
    def of(cls, rows: Rows) -> Divergence | None:
        """None where there are no rows."""
        n_rows = len(rows)
        if n_rows == 0:
            return None
        same = float(rows.same_top1.mean())
        reference_loss, loss = float(rows.reference_loss.mean()), float(rows.other_loss.mean())
        return cls(
            n_rows=n_rows,
            mean_kl=float(rows.kl.mean()),
            rms_delta_p=float(np.sqrt(np.square(rows.delta_p).mean())),
            same_top1=same,
            same_top1_error=_CONFIDENCE_95 * math.sqrt(same * (1 - same) / n_rows),
            reference_perplexity=_exp(reference_loss),
            perplexity=_exp(loss),
            perplexity_ratio=_exp(loss - reference_loss),
        )

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def log_softmax(logits: npt.NDArray[np.float32]) -> FloatArray:
    """Along the last axis, in double precision."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
