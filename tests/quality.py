"""How well one model imitates another on a text: perplexity, KL divergence and top-1 agreement.

The protocol of llama-perplexity: the text is cut into windows of `window_tokens`, each evaluated from an
empty KV cache, and the predictions made in its second half are scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llama_model import LlamaModel

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Quality:
    """A draft against its target over the same positions."""

    target_perplexity: float
    draft_perplexity: float
    mean_kl: float
    """Mean of KL(target ‖ draft) in nats."""
    same_top1: float
    """Share of positions, 0 to 1, at which both find the same token most probable."""


def compare(
    target_path: Path,
    draft_path: Path,
    text: str,
    *,
    draft_experts_used: int | None = None,
    window_tokens: int = 512,
    max_windows: int = 6,
) -> Quality:
    """Score the draft, with `draft_experts_used` experts per token when given, against the target."""
    with (
        LlamaModel(target_path, n_ctx=window_tokens) as target,
        LlamaModel(draft_path, n_ctx=window_tokens, experts_used=draft_experts_used) as draft,
    ):
        target_loss, draft_loss, divergence, agreement = [], [], [], []
        for window in _windows(target.tokenize(text), window_tokens, max_windows):
            first = window_tokens // 2
            following = np.asarray(window[first + 1 :])
            target_log = _log_softmax(target.logits(window)[first:-1])
            draft_log = _log_softmax(draft.logits(window)[first:-1])
            rows = np.arange(len(following))
            target_loss.append(-target_log[rows, following])
            draft_loss.append(-draft_log[rows, following])
            divergence.append((np.exp(target_log) * (target_log - draft_log)).sum(axis=-1))
            agreement.append(target_log.argmax(axis=-1) == draft_log.argmax(axis=-1))
    return Quality(
        target_perplexity=float(np.exp(np.concatenate(target_loss).mean())),
        draft_perplexity=float(np.exp(np.concatenate(draft_loss).mean())),
        mean_kl=float(np.concatenate(divergence).mean()),
        same_top1=float(np.concatenate(agreement).mean()),
    )


def _windows(tokens: list[int], window_tokens: int, max_windows: int) -> Iterator[list[int]]:
    n_windows = min(max_windows, len(tokens) // window_tokens)
    if n_windows == 0:
        raise ValueError(f"{len(tokens)} tokens do not fill a window of {window_tokens}")
    for start in range(0, n_windows * window_tokens, window_tokens):
        yield tokens[start : start + window_tokens]


def _log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
