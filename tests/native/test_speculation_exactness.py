"""Without gating, greedy text and each logit behind it are those of plain decoding, whatever is drafted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from expert_models import EXPERT_MODELS, SPLIT_MODELS, variant_of
from speculation_model import (
    EXACT,
    FORCED_DEPTH,
    N_VERIFY_ROWS,
    Answer,
    SpeculationModel,
    assert_same,
    plain_answer,
)
from stored_model import PROMPT, Layout, StoredModel

pytestmark = pytest.mark.usefixtures("batch_invariance")

MODELS = [*EXPERT_MODELS, *SPLIT_MODELS]
FAMILIES = ["llama", "olmoe", "qwen3moe", "deepseek2-lite", "deepseek2-v3", "gpt-oss"]
CACHE_SHARES = (0, 0.5, 1)
"""Floor, half, all."""
N_TOKENS = 16
KV_PADDING = 256
"""llama.cpp computes attention over so many cells more at once."""


@pytest.fixture(scope="module")
def plain(expert_model: Callable[[str], Path]) -> Iterator[Callable[..., Answer]]:
    """The answer of a model in a context without room for drafts, with every expert in memory."""
    known: dict[tuple[str, int, int], Answer] = {}

    def answer_of(
        name: str, prompt: list[int], n_tokens: int, n_threads: int = 1, n_ctx: int = 256
    ) -> Answer:
        key = (name, len(prompt), n_threads)
        if key not in known:
            path = expert_model(name)
            full_bytes = Layout.of(path).full_bytes
            with StoredModel(path, full_bytes, io="buffered", n_ctx=n_ctx, n_threads=n_threads) as model:
                known[key] = plain_answer(model, prompt, n_tokens)
        return known[key]

    yield answer_of
    known.clear()


def assert_drafted(answer: Answer) -> None:
    """Every step with room for drafts had some, so that the comparison means something."""
    report = answer.report
    n_last = 1 if len(answer.steps) > 1 else 0  # the last step may have had room for one token only
    assert report["n_steps"] == len(answer.steps)
    assert report["n_iterations"] >= report["n_steps"] - n_last
    assert report["n_admitted"] > report["n_iterations"]
    assert report["displaced_weight"] == 0
    assert report["n_biased_rows"] == 0


@pytest.mark.parametrize(("name", "share"), [*product(MODELS, CACHE_SHARES)], ids=str)
def test_greedy_answers_equal_plain_decoding(
    name: str, share: float, expert_model: Callable[[str], Path], plain: Callable[..., Answer]
) -> None:
    """Drafts with a few experts are mostly wrong here; those with all of them are mostly right."""
    expected = plain(name, PROMPT, N_TOKENS)
    with SpeculationModel(expert_model(name), share=share) as model:
        for n_draft_experts in (0, variant_of(name).n_expert_used):
            options = EXACT | {"draft_experts": n_draft_experts}
            answer = model.answer(PROMPT, N_TOKENS, options)
            assert_same(answer, expected)
            assert_drafted(answer)


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_are_accepted_and_rejected(name: str, expert_model: Callable[[str], Path]) -> None:
    """Otherwise equal answers would prove little."""
    with SpeculationModel(expert_model(name)) as model:
        k = variant_of(name).n_expert_used
        report = model.answer(PROMPT, 32, EXACT | {"draft_experts": k}).report
        assert report["n_accepted"] > report["n_iterations"]
        lengths = Counter(dict(enumerate(report["acceptance_lengths"])))
        assert lengths[FORCED_DEPTH] > 0
        assert 0 < report["n_accepted"] < report["n_admitted"]  # the second of two siblings is rejected
        few = model.answer(PROMPT, 32, EXACT).report
        assert few["n_accepted"] < report["n_accepted"]


@pytest.mark.parametrize(
    ("name", "boundary", "n_threads"),
    [
        *product(FAMILIES, (KV_PADDING, 2 * KV_PADDING), (1,)),
        # fewer: two threads of ggml are slow where other processes want the processors, too
        ("llama", KV_PADDING, 2),
        ("gpt-oss", 2 * KV_PADDING, 2),
    ],
    ids=str,
)
def test_answers_across_a_boundary_of_the_kv_cache(
    name: str,
    boundary: int,
    n_threads: int,
    expert_model: Callable[[str], Path],
    plain: Callable[..., Answer],
) -> None:
    """Drafts reach over it some steps before plain decoding does."""
    n_ctx = boundary + KV_PADDING
    prompt = [40 + (7 * i) % 200 for i in range(boundary - 10)]
    expected = plain(name, prompt, 20, n_threads, n_ctx)
    with SpeculationModel(expert_model(name), share=0.5, n_ctx=n_ctx, n_threads=n_threads) as model:
        for n_draft_experts in (0, variant_of(name).n_expert_used):
            answer = model.answer(prompt, 20, EXACT | {"draft_experts": n_draft_experts})
            assert_same(answer, expected)
            assert_drafted(answer)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "off"},
        {"preset": "exact"},
        {"preset": "fast", "exact": True},
        {"preset": "balanced", "error_budget": 0},
        {"preset": "fast", "reuse_gating": False},
        EXACT | {"max_nodes": 1},
        EXACT | {"max_nodes": N_VERIFY_ROWS - 1},
        EXACT | {"prefetch": False},
        EXACT | {"method": "cascade"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-mxfp4"])
def test_every_exact_setting_equals_plain_decoding(
    name: str, options: dict[str, object], expert_model: Callable[[str], Path], plain: Callable[..., Answer]
) -> None:
    with SpeculationModel(expert_model(name), share=0.3) as model:
        answer = model.answer(PROMPT, N_TOKENS, options)
        assert_same(answer, plain(name, PROMPT, N_TOKENS))
        if options.get("method") == "off":
            assert answer.steps == [1] * N_TOKENS
            assert answer.report["n_drafted"] == 0


@pytest.mark.parametrize(
    "options",
    [{"method": "expert-skip"}, EXACT | {"shared_context": False}],
    ids=str,
)
@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-mxfp4", "deepseek2-lite"])
def test_drafts_of_an_independent_context_change_nothing(
    name: str, options: dict[str, object], expert_model: Callable[[str], Path], plain: Callable[..., Answer]
) -> None:
    with SpeculationModel(expert_model(name), share=0.3, draft_n_ctx=256) as model:
        for prompt in (
            PROMPT,
            PROMPT[:5],
            PROMPT,
        ):  # what its cache holds of an earlier answer must not matter
            answer, expected = model.answer(prompt, N_TOKENS, options), plain(name, prompt, N_TOKENS)
            if options.get("method") == "expert-skip":
                # it verifies more rows than kernels compute one by one
                assert answer.tokens == expected.tokens
                np.testing.assert_allclose(answer.rows, expected.rows, atol=0.05)
            else:
                assert_same(answer, expected)
            assert answer.report["n_admitted"] > 0


@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-mxfp4"])
def test_gating_changes_answers(name: str, expert_model: Callable[[str], Path]) -> None:
    """The comparisons above would see it."""
    with SpeculationModel(expert_model(name), share=0) as model:
        exact = model.answer(PROMPT, 64, EXACT)
        lax = {"error_budget": 1, "reuse_strength": 10, "residency_weight": 10, "single_token_bias": True}
        gated = model.answer(PROMPT, 64, {"preset": "fast", "adaptive": False} | lax)
    assert gated != exact
    assert gated.report["n_biased_rows"] > 0
    assert gated.report["displaced_weight"] > 0


def test_one_request_after_another_with_other_settings(
    expert_model: Callable[[str], Path], plain: Callable[..., Answer]
) -> None:
    """Nothing of a request's settings stays behind."""
    expected = plain("q4_k_m", PROMPT, N_TOKENS)
    with SpeculationModel(expert_model("q4_k_m"), share=0.3) as model:
        model.answer(PROMPT, N_TOKENS, {"preset": "fast", "adaptive": False})
        assert_same(model.answer(PROMPT, N_TOKENS, EXACT), expected)
        model.answer(PROMPT, N_TOKENS, {"preset": "fast", "adaptive": False, "draft_experts": 1})
        assert_same(plain_answer(model, PROMPT, N_TOKENS), expected)
        assert_same(model.answer(PROMPT, N_TOKENS, {"method": "off"}), expected)


def test_greedy_answers_of_the_demo_model(tiny_model_path: Path) -> None:
    """Real text, in which drafts are accepted. `python -m s2moe.bench.exactness` does many more."""
    questions = ("Tell me a story about a river.", "Write a Python function that adds two numbers.")
    report: Counter[str] = Counter()
    with (
        StoredModel(
            tiny_model_path, Layout.of(tiny_model_path).full_bytes, io="buffered", n_ctx=256
        ) as whole,
        SpeculationModel(tiny_model_path, share=0.5) as model,
    ):
        for question in questions:
            prompt = whole.tokenize(whole.chat_prompt(("user", question)), parse_special=True)
            answer = model.answer(prompt, 32, EXACT)
            assert_same(answer, plain_answer(whole, prompt, 32))
            report.update({key: answer.report[key] for key in ("n_iterations", "n_accepted", "n_admitted")})
    assert report["n_iterations"] > 15
    assert report["n_accepted"] / report["n_iterations"] > 0.3
    assert report["n_accepted"] < report["n_admitted"]
