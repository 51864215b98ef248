"""Runs the target along texts, and drafts with fewer experts from many points of them.

Drafts are given the text's tokens, so that each step has an exact counterpart: what is measured at step j
holds where the j − 1 drafts before were accepted. All steps of a start are then one decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from s2moe.bench.premise.figures import DraftFigures, Ids
from s2moe.engine.divergence import Rows
from s2moe.engine.model import Model

N_STEPS: Final = 8
"""Decode steps of a start: the root and seven drafts."""
ALL_EXPERTS: Final = 0

Logits = npt.NDArray[np.float32]


class PremiseError(Exception):
    """Nothing can be measured on this model; the message is one line with the remedy."""


@dataclass(frozen=True)
class Text:
    prompt: list[int]
    following: list[int] | None = None
    """None: what the target itself says, greedily."""


@dataclass(frozen=True)
class Recorded:
    """The target along a text."""

    prompt: list[int]
    tokens: list[int]
    """Behind the prompt."""
    logits: Logits
    """[n_tokens, n_vocab] after each of them."""
    ids: Ids
    """[n_layer, n_tokens, k]"""

    def starts(self, stride: int) -> list[int]:
        """Tokens from which on there are N_STEPS more, the last first."""
        return list(range(0, len(self.tokens) - N_STEPS, stride))[::-1]


class Evaluator:
    """Decodes on sequence 0 with any number of experts."""

    def __init__(self, model: Model) -> None:
        """Raises PremiseError for a model without experts, or whose KV cache cannot be cut."""
        self._model = model
        if model.info.n_expert == 0:
            raise PremiseError("the model has no experts, so nothing can be drafted with fewer of them")
        if model.llama_cpp.llama_model_is_recurrent(model.handle) or model.llama_cpp.llama_model_is_hybrid(
            model.handle
        ):
            raise PremiseError("the model has a recurrent state, which drafts cannot be rolled back from")
        model.library.set_router_recording(model.context, record=True)

    def close(self) -> None:
        model = self._model
        model.library.set_n_expert_used(model.context, ALL_EXPERTS)
        model.library.set_router_recording(model.context, record=False)
        model.forget()

    def prefill(self, prompt: list[int], n_experts: int) -> Logits:
        """From an empty KV cache. Returns the logits [n_vocab] of the last token."""
        model = self._model
        model.forget()
        model.library.set_n_expert_used(model.context, n_experts)
        for start in range(0, len(prompt), model.n_batch):
            model.library.decode(model.context, prompt[start : start + model.n_batch], start)
        return self._logits(-1)

    def evaluate(self, tokens: list[int], position: int, n_experts: int) -> tuple[Logits, Ids]:
        """Behind the KV cache. Returns logits [n_tokens, n_vocab] and ids [n_layer, n_tokens, k]."""
        model = self._model
        model.library.set_n_expert_used(model.context, n_experts)
        model.library.decode(model.context, tokens, position, all_logits=True)
        logits = np.stack([self._logits(index) for index in range(len(tokens))])
        return logits, model.library.router_ids(model.context)

    def cut(self, position: int) -> None:
        """Drops what lies at `position` and behind."""
        self._model.llama_cpp.llama_memory_seq_rm(self._model.memory, 0, position, -1)

    def is_end(self, token: int) -> bool:
        return self._model.is_end(token)

    def _logits(self, index: int) -> Logits:
        model = self._model
        pointer = model.llama_cpp.llama_get_logits_ith(model.context, index)
        return np.ctypeslib.as_array(pointer, shape=(model.info.n_vocab,)).copy()


def record(evaluator: Evaluator, text: Text, n_tokens: int) -> Recorded:
    """Evaluates up to n_tokens behind the prompt, one by one. The KV cache then holds all of it."""
    following = text.following
    logits = [evaluator.prefill(text.prompt, ALL_EXPERTS)]
    tokens: list[int] = []
    ids: list[Ids] = []
    n_tokens = n_tokens if following is None else min(n_tokens, len(following))
    while len(tokens) < n_tokens:
        token = int(logits[-1].argmax()) if following is None else following[len(tokens)]
        if following is None and evaluator.is_end(token):
            break
        row, routed = evaluator.evaluate([token], len(text.prompt) + len(tokens), ALL_EXPERTS)
        tokens.append(token)
        logits.append(row[0])
        ids.append(routed)
    if not tokens:
        return Recorded(text.prompt, [], np.empty((0, 0), np.float32), np.empty((0, 0, 0), np.int32))
    return Recorded(text.prompt, tokens, np.stack(logits[1:]), np.concatenate(ids, axis=1))


def draft_along(
    evaluator: Evaluator, recorded: Recorded, figures: Sequence[DraftFigures], *, stride: int
) -> int:
    """Drafts from each start with each number of experts; the KV cache must hold the recorded text.

    Returns the number of starts.
    """
    starts = recorded.starts(stride)
    for start in starts:
        position = len(recorded.prompt) + start
        steps = slice(start, start + N_STEPS)
        for figure in figures:
            evaluator.cut(position)
            logits, ids = evaluator.evaluate(recorded.tokens[steps], position, figure.n_experts)
            figure.shared.add(_compare(recorded, steps, logits))
            figure.add_routing(ids, recorded.ids[:, steps])
    for figure in figures:
        if starts:
            _draft_apart(evaluator, recorded, starts, figure)
    return len(starts)


def _draft_apart(evaluator: Evaluator, recorded: Recorded, starts: list[int], figure: DraftFigures) -> None:
    """With a KV cache that only ever saw this number of experts, prompt included."""
    n_tokens = len(recorded.tokens)
    evaluator.prefill(recorded.prompt, figure.n_experts)
    parts = [
        evaluator.evaluate(
            recorded.tokens[first : first + N_STEPS], len(recorded.prompt) + first, figure.n_experts
        )[0]
        for first in range(0, n_tokens, N_STEPS)
    ]
    logits = np.concatenate(parts)
    for start in starts:
        steps = slice(start, start + N_STEPS)
        figure.independent.add(_compare(recorded, steps, logits[steps]))


def _compare(recorded: Recorded, steps: slice, logits: Logits) -> Rows:
    following = recorded.tokens[steps.start + 1 : steps.stop + 1]
    return Rows.compare(recorded.logits[steps], logits, following)
