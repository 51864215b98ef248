"""The graphs that a speculator keeps are those that the memory plan counts."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest

from s2moe.engine.contexts import MAX_WIDE_ROWS, kept_widths, small_graphs_bytes
from s2moe.engine.native_speculation import N_VERIFY_ROWS

from speculation_model import Run, SpeculationModel, write_small_model

pytestmark = pytest.mark.usefixtures("batch_invariance")

N_CTX = 256
PROMPT = [40 + (7 * i) % 200 for i in range(N_CTX)]


def widths_of(model: SpeculationModel, n_prompt: int, n_tokens: int) -> set[int]:
    """Tokens of the verifications of one answer of expert-skip."""
    run = Run(model, PROMPT[:n_prompt], {"method": "expert-skip"})
    widths: set[int] = set()
    n_admitted = 0
    while len(run.answer.tokens) < n_tokens:
        run.step(n_tokens - len(run.answer.tokens))
        n_before, n_admitted = n_admitted, model.speculator.report()["n_admitted"]
        widths.add(1 + n_admitted - n_before)
    run.close()
    return widths


def test_every_width_of_expert_skip_is_planned(tmp_path: Path) -> None:
    """Near the end of an answer verifications are narrower, and near that of the context by single tokens."""
    with SpeculationModel(write_small_model(tmp_path), n_ctx=N_CTX, draft_n_ctx=N_CTX) as model:
        seen: set[int] = set()
        for n_tokens in range(1, N_VERIFY_ROWS + 2):
            seen |= widths_of(model, 20, n_tokens)
        for n_prompt in range(N_CTX - 20, N_CTX):
            seen |= widths_of(model, n_prompt, min(N_VERIFY_ROWS + 1, N_CTX - n_prompt))
        n_bytes = model.speculator.report()["graph_bytes"]
        n_layer = llama_cpp.llama_model_n_layer(model._model)
        planned_bytes = small_graphs_bytes(n_layer, model.n_vocab, has_draft_context=True)
    assert seen >= set(range(N_VERIFY_ROWS + 1, MAX_WIDE_ROWS + 1))
    assert seen <= set(kept_widths(has_draft_context=True))
    assert 0 < n_bytes <= planned_bytes
