"""Between steps the KV cache holds the committed tokens, as plain decoding leaves them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import llama_cpp
import pytest

from expert_models import variant_of
from speculation_model import (
    ADAPTIVE,
    EXACT,
    N_VERIFY_ROWS,
    Run,
    SpeculationModel,
    assert_branched,
    kv_bytes,
    last_positions,
    write_small_model,
)
from stored_model import PROMPT

pytestmark = pytest.mark.usefixtures("batch_invariance")

DRAFTS = {"forced": EXACT, "adaptive": ADAPTIVE}
N_KEPT = 200
"""Tokens at which the cache is cut back, so that the iterations fit a small context."""


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("k_draft", ["few", "all"])
@pytest.mark.parametrize("name", ["llama", "olmoe", "qwen3moe", "deepseek2-lite", "gpt-oss", "q4_k_m"])
def test_a_step_leaves_what_plain_decoding_leaves(
    name: str, k_draft: str, drafts: str, expert_model: Callable[[str], Path]
) -> None:
    """Its drafts, accepted or rejected, change no bit of what was committed before, and what they add is what
    the target itself computes."""
    n_draft_experts = 0 if k_draft == "few" else variant_of(name).n_expert_used
    rejected = accepted = 0
    options = DRAFTS[drafts] | {"draft_experts": n_draft_experts}
    with SpeculationModel(expert_model(name), share=0.3) as model:
        model.make_drafts_pay(options)
        run = Run(model, PROMPT, options)
        memory = llama_cpp.llama_get_memory(model.context)
        for _ in range(12):
            before, position, root = kv_bytes(model), run.position, run.root
            tokens = run.step()
            after = kv_bytes(model)
            assert after != before
            assert last_positions(model) == [run.position - 1] + [-1] * 7
            assert llama_cpp.llama_memory_seq_rm(memory, 0, position, -1)
            assert kv_bytes(model) == before, "drafts changed committed cells"
            for i, token in enumerate([root, *tokens[:-1]]):
                model.library.decode(model.context, [token], position + i)
            assert kv_bytes(model) == after, "accepted drafts left other cells than plain decoding"
            accepted += len(tokens) - 1
        report = run.close().report
        rejected = report["n_admitted"] - report["n_accepted"]
    assert report["n_accepted"] == accepted
    assert rejected > 0
    if drafts == "adaptive":
        assert_branched(report)
    if k_draft == "all":
        assert accepted > 0


@pytest.mark.parametrize(("drafts", "n_steps"), [("forced", 5000), ("adaptive", 2000)])
def test_nothing_is_left_behind_in_thousands_of_iterations(tmp_path: Path, drafts: str, n_steps: int) -> None:
    """No sequence, no cell and no graph: a leak of any would fill the cache, or the log of graphs. Steps are
    of every width, one after another."""
    options = DRAFTS[drafts] | {"draft_experts": 2}
    # steps without room for drafts would show an adaptive speculator what a token costs
    n_max_least = 1 if drafts == "forced" else 2
    n_widths = N_VERIFY_ROWS + 1 - n_max_least
    with SpeculationModel(write_small_model(tmp_path)) as model:
        model.make_drafts_pay(options)
        run = Run(model, PROMPT, options, {"temperature": 1, "seed": 7})
        cells = CellCounter(model)
        n_builds = 0
        widths: set[int] = set()
        n_admitted = 0
        for i in range(n_steps):
            run.step(n_max_least + 5 * i % n_widths)
            assert last_positions(model) == [run.position - 1] + [-1] * 7, f"iteration {i}"
            if run.position > N_KEPT:
                assert cells.count() == run.position, f"iteration {i}"
                run.cut_back()
            if i < 3 * N_VERIFY_ROWS:
                n_before, n_admitted = n_admitted, model.speculator.report()["n_admitted"]
                widths.add(n_admitted - n_before)
            if i == n_steps // 2:
                n_builds = model.speculator.report()["n_graph_builds"]
        report = run.close().report
    assert report["n_steps"] == n_steps
    assert widths >= set(range(n_max_least - 1, N_VERIFY_ROWS)), "not every width was verified"
    assert 0 < report["n_accepted"] < report["n_admitted"]
    if drafts == "adaptive":
        assert report["n_iterations"] > 0.9 * n_steps
        assert_branched(report)
    else:
        assert report["n_iterations"] == n_steps - n_steps // N_VERIFY_ROWS
        late_builds = report["n_graph_builds"] - n_builds
        assert late_builds < n_steps // 100, f"{late_builds} graphs built in the second half"


def test_trees_that_branch_elsewhere_build_no_graph(expert_model: Callable[[str], Path]) -> None:
    n_steps = 100
    with SpeculationModel(expert_model("llama")) as model:
        model.make_drafts_pay(ADAPTIVE)
        run = Run(model, PROMPT, ADAPTIVE)
        n_builds = 0
        for i in range(n_steps):
            run.step(N_VERIFY_ROWS)
            if run.position > N_KEPT:
                run.cut_back()
            if i == n_steps // 2:
                n_builds = model.speculator.report()["n_graph_builds"]
        report = run.close().report
    assert_branched(report)
    late_builds = report["n_graph_builds"] - n_builds
    assert late_builds < n_steps // 10, f"{late_builds} graphs built in the second half"


class CellCounter:
    """Counts the cells that hold anything of any sequence, by the size of their saved state."""

    def __init__(self, model: SpeculationModel) -> None:
        """The KV cache must hold the prompt but for its last token."""
        self._model = model
        memory = llama_cpp.llama_get_memory(model.context)
        n_tokens, n_bytes = model.n_kv, len(kv_bytes(model, -1))
        assert llama_cpp.llama_memory_seq_rm(memory, 0, n_tokens - 1, -1)
        self._cell_bytes = n_bytes - len(kv_bytes(model, -1))
        self._empty_bytes = n_bytes - n_tokens * self._cell_bytes
        model.library.decode(model.context, [PROMPT[n_tokens - 1]], n_tokens - 1)
        assert self.count() == n_tokens

    def count(self) -> float:
        """Not whole if a cell belongs to several sequences."""
        return (len(kv_bytes(self._model, -1)) - self._empty_bytes) / self._cell_bytes
