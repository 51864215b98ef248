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
    ADAPTIVE,
    EXACT,
    FORCED_DEPTH,
    N_VERIFY_ROWS,
    Answer,
    SpeculationModel,
    assert_branched,
    assert_same,
    plain_answer,
)
from stored_model import PROMPT, Layout, StoredModel, settle

pytestmark = pytest.mark.usefixtures("batch_invariance")

MODELS = [*EXPERT_MODELS, *SPLIT_MODELS]
FAMILIES = ["llama", "olmoe", "qwen3moe", "deepseek2-lite", "deepseek2-lite-2024", "deepseek2-v3", "gpt-oss"]
CACHE_SHARES = (0, 0.5, 1)
"""Floor, half, all."""
N_TOKENS = 16
ROUNDING = 0.05
"""Of logits, where kernels compute rows of a wide batch otherwise than single ones."""
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


def assert_same_up_to_rounding(answer: Answer, expected: Answer) -> None:
    """Up to a token that was chosen by less than rounding, if there is one."""
    pairs = zip(answer.tokens, expected.tokens, strict=True)
    n_same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    n_compared = len(expected.tokens) if n_same is None else n_same + 1
    np.testing.assert_allclose(answer.rows[:n_compared], expected.rows[:n_compared], atol=ROUNDING)
    if n_same is not None:
        second, best = np.partition(expected.rows[n_same], -2)[-2:]
        assert best - second < ROUNDING, f"token {n_same}"


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


@pytest.mark.parametrize("name", MODELS)
def test_trees_that_branch_as_it_pays_equal_plain_decoding(
    name: str, expert_model: Callable[[str], Path], plain: Callable[..., Answer]
) -> None:
    expected = plain(name, PROMPT, N_TOKENS)
    with SpeculationModel(expert_model(name), share=0.3) as model:
        options = [ADAPTIVE | {"draft_experts": n} for n in (0, variant_of(name).n_expert_used)]
        model.make_drafts_pay(*options)
        n_accepted = 0
        for each in options:
            answer = model.answer(PROMPT, N_TOKENS, each)
            assert_same(answer, expected)
            assert_branched(answer.report)
            assert answer.report["n_iterations"] >= answer.report["n_steps"] - 2
            assert answer.report["n_biased_rows"] == 0
            n_accepted += answer.report["n_accepted"]
        assert n_accepted > 0


@pytest.mark.parametrize("options", [EXACT, ADAPTIVE], ids=["forced", "adaptive"])
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_are_verified_behind_what_they_were_drafted_behind(
    name: str, options: dict[str, object], expert_model: Callable[[str], Path]
) -> None:
    """Answers are exact also if a draft is hung on a wrong parent. But with all experts a draft computes what
    its verification computes behind the same tokens, and so predicts the very experts of each layer."""
    options = options | {"draft_experts": variant_of(name).n_expert_used}
    with SpeculationModel(expert_model(name), share=1) as model:
        model.experts.warm([[1] * len(layer) for layer in model.experts.counts()])
        settle(model.experts)
        model.make_drafts_pay(options)
        report = model.answer(PROMPT, 48, options).report
    if "adaptive" not in options:
        assert_branched(report)
    n_experts = report["routing_hits"] + report["routing_misses"]
    n_evaluated = n_experts / (len(variant_of(name).moe_layers) * variant_of(name).n_expert_used)
    assert n_evaluated > 2 * report["n_iterations"], "of too few drafts something was predicted"
    assert (report["routing_misses"], report["routing_extra"]) == (0, 0)


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
        model.make_drafts_pay(options)
        answer = model.answer(PROMPT, N_TOKENS, options)
        assert_same(answer, plain(name, PROMPT, N_TOKENS))
        if options.get("method") == "off":
            assert answer.steps == [1] * N_TOKENS
            assert answer.report["n_drafted"] == 0
        else:
            assert answer.report["n_admitted"] > 0


@pytest.mark.parametrize(
    "options",
    [{"method": "expert-skip"}, EXACT | {"shared_context": False}, ADAPTIVE | {"shared_context": False}],
    ids=str,
)
@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-mxfp4", "deepseek2-lite"])
def test_drafts_of_an_independent_context_change_nothing(
    name: str, options: dict[str, object], expert_model: Callable[[str], Path], plain: Callable[..., Answer]
) -> None:
    with SpeculationModel(expert_model(name), share=0.3, draft_n_ctx=256) as model:
        model.make_drafts_pay(options)
        for prompt in (
            PROMPT,
            PROMPT[:5],
            PROMPT,
        ):  # what its cache holds of an earlier answer must not matter
            answer, expected = model.answer(prompt, N_TOKENS, options), plain(name, prompt, N_TOKENS)
            if options.get("method") == "expert-skip":
                # it verifies more rows than kernels compute one by one
                assert_same_up_to_rounding(answer, expected)
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


@pytest.mark.parametrize("options", [EXACT, ADAPTIVE], ids=["forced", "adaptive"])
def test_greedy_answers_of_the_demo_model(tiny_model_path: Path, options: dict[str, object]) -> None:
    """Real text, in which drafts are accepted. `python -m s2moe.bench.exactness` does many more."""
    questions = ("Tell me a story about a river.", "Write a Python function that adds two numbers.")
    report: Counter[str] = Counter()
    with (
        StoredModel(
            tiny_model_path, Layout.of(tiny_model_path).full_bytes, io="buffered", n_ctx=256
        ) as whole,
        SpeculationModel(tiny_model_path, share=0.5) as model,
    ):
        model.make_drafts_pay(options)
        for question in questions:
            prompt = whole.tokenize(whole.chat_prompt(("user", question)), parse_special=True)
            answer = model.answer(prompt, 32, options)
            assert_same(answer, plain_answer(whole, prompt, 32))
            report.update({key: answer.report[key] for key in ("n_iterations", "n_accepted", "n_admitted")})
    assert report["n_iterations"] > 15
    assert report["n_accepted"] / report["n_iterations"] > 0.3
    assert report["n_accepted"] < report["n_admitted"]
