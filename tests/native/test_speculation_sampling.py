"""Sampled text: the same seed gives the same answer, and answers follow the model's distribution."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from expert_models import variant_of
from speculation_model import (
    EXACT,
    SpeculationModel,
    assert_same,
    plain_answer,
    prefilled,
    row_of,
    write_small_model,
)
from stored_model import PROMPT, Layout, StoredModel

pytestmark = pytest.mark.usefixtures("batch_invariance")

N_TOKENS = 24
SAMPLINGS: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 0.7, "seed": 1},
    "hot": {"temperature": 1.5, "seed": 2, "top_p": 0.95},
    "top_k": {"temperature": 1, "seed": 3, "top_k": 5, "min_p": 0.05},
    "penalties": {
        "temperature": 0, "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.7,
        "repeat_last_n": 64,
    },
    "sampled penalties": {"temperature": 0.8, "seed": 4, "frequency_penalty": 1.0, "repeat_last_n": 8},
    "logit_bias": {"temperature": 0.6, "seed": 5, "logit_bias": [[100, 6.0], [101, -100.0], [42, 5.0]]},
    "grammar": {"temperature": 0.9, "seed": 6, "grammar": 'root ::= [a-f ]{80} "."'},
    "greedy grammar": {"temperature": 0, "grammar": "root ::= ([0-9]{2} [x-z])*"},
}  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-mxfp4", "olmoe-q4_k"])
def test_sampled_answers_equal_plain_decoding(
    name: str, sampling: str, expert_model: Callable[[str], Path]
) -> None:
    path, parameters = expert_model(name), SAMPLINGS[sampling]
    with StoredModel(path, Layout.of(path).full_bytes, io="buffered", n_ctx=256) as whole:
        expected = plain_answer(whole, PROMPT, N_TOKENS, parameters)
        unbiased = plain_answer(whole, PROMPT, N_TOKENS, {"temperature": 0})
    assert expected.tokens != unbiased.tokens, "the sampling parameters do nothing"
    with SpeculationModel(path, share=0.3) as model:
        for n_draft_experts in (0, variant_of(name).n_expert_used):
            answer = model.answer(PROMPT, N_TOKENS, EXACT | {"draft_experts": n_draft_experts}, parameters)
            assert_same(answer, expected)
            assert answer.report["n_admitted"] > answer.report["n_iterations"] > 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 11},
        {"temperature": 0, "repeat_penalty": 1.3},
        {
            "temperature": 0.7,
            "seed": 12,
            "grammar": 'root ::= "1. " [A-Z] [a-z ,]+ ". 2. " [A-Z] [a-z ,]+ "."',
        },
    ],
    ids=["seed", "penalty", "grammar"],
)
def test_sampled_answers_of_the_demo_model(tiny_model_path: Path, sampling: dict[str, Any]) -> None:
    with SpeculationModel(tiny_model_path, share=0.5) as model:
        text = model.chat_prompt(("user", "Name two animals of the sea."))
        prompt = model.tokenize(text, parse_special=True)
        expected = plain_answer(model, prompt, N_TOKENS, sampling)
        answer = model.answer(prompt, N_TOKENS, EXACT, sampling)
        assert_same(answer, expected)
        assert answer.report["n_accepted"] > 0
        other_seed = plain_answer(model, prompt, N_TOKENS, sampling | {"seed": 13, "temperature": 0.8})
        assert other_seed.tokens != expected.tokens


def test_the_sampler_draws_nothing_for_rejected_drafts(expert_model: Callable[[str], Path]) -> None:
    """Its state after an answer is that after plain decoding: a further token is the same."""
    sampling = {"temperature": 1.2, "seed": 21}
    with SpeculationModel(expert_model("q4_0")) as model:
        expected = plain_answer(model, PROMPT, 40, sampling)
        for n_tokens in (1, 2, 7, 23):
            answer = model.answer(PROMPT, n_tokens, EXACT, sampling)
            assert answer.tokens == expected.tokens[:n_tokens]


# ── the distribution ────────────────────────────────────────────────────────────────────────────

N_SAMPLES = 20_000
N_CHOICES = 4
"""Tokens that sampling leaves to choose from (top_k), so that all texts can be listed."""
N_TEXT = 4
"""Tokens of a text: one step chooses several of them where drafts are accepted."""
SAMPLING = {"temperature": 1, "top_k": N_CHOICES, "top_p": 1, "min_p": 0, "seed": 1}
Text = tuple[int, ...]


@pytest.fixture(scope="module")
def small_model(
    tmp_path_factory: pytest.TempPathFactory, batch_invariance: None
) -> Iterator[SpeculationModel]:
    with SpeculationModel(write_small_model(tmp_path_factory.mktemp("small"))) as model:
        yield model


@pytest.fixture(scope="module")
def probabilities(small_model: SpeculationModel) -> dict[Text, float]:
    """Of every text that can follow the prompt, from the softmax of plain logits."""
    return text_probabilities(small_model, temperature=1)


def text_probabilities(model: SpeculationModel, temperature: float) -> dict[Text, float]:
    prefilled(model, PROMPT, {}).close()
    memory = llama_cpp.llama_get_memory(model.context)
    begin = len(PROMPT) - 1
    probabilities: dict[Text, float] = {(): 1.0}
    for depth in range(N_TEXT):
        longer: dict[Text, float] = {}
        for text, probability in probabilities.items():
            llama_cpp.llama_memory_seq_rm(memory, 0, begin, -1)
            for i, token in enumerate([PROMPT[-1], *text]):
                model.library.decode(model.context, [token], begin + i)
            logits = row_of(model, -1).astype(np.float64) / temperature
            best = np.argsort(-logits)[:N_CHOICES]
            weights = np.exp(logits[best] - logits.max())
            for token, share in zip(best, weights / weights.sum(), strict=True):
                longer[(*text, int(token))] = probability * float(share)
        assert len(longer) == N_CHOICES ** (depth + 1)
        probabilities = longer
    return probabilities


def sample_texts(
    model: SpeculationModel, next_tokens: Callable[[Any, int, int, int], list[int]]
) -> Counter[Text]:
    """N_SAMPLES texts drawn by one sampler; `next_tokens(sampler, root, position, n_max)`."""
    sampler = prefilled(model, PROMPT, SAMPLING)
    memory = llama_cpp.llama_get_memory(model.context)
    begin = len(PROMPT) - 1
    texts: Counter[Text] = Counter()
    for _ in range(N_SAMPLES):
        text = [PROMPT[-1]]
        while (n_missing := N_TEXT + 1 - len(text)) > 0:
            text += next_tokens(sampler, text[-1], begin + len(text) - 1, n_missing)
        texts[tuple(text[1:])] += 1
        llama_cpp.llama_memory_seq_rm(memory, 0, begin, -1)
    sampler.close()
    return texts


def chi_square_excess(texts: Counter[Text], probabilities: dict[Text, float]) -> float:
    """How many standard deviations the chi-square statistic lies above its mean, by Wilson and Hilferty's
    approximation; texts that are expected fewer than 5 times count together."""
    n = texts.total()
    assert set(texts) <= set(probabilities), "a text of probability 0 was drawn"
    common = [text for text, p in probabilities.items() if n * p >= 5]
    observed = [texts[text] for text in common]
    expected = [n * probabilities[text] for text in common]
    if len(common) < len(probabilities):
        observed.append(n - sum(observed))
        expected.append(n - sum(expected))
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    degrees = len(observed) - 1
    variance = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)


def assert_drawn_from(texts: Counter[Text], probabilities: dict[Text, float]) -> None:
    """Whole texts, and the tokens at each position by themselves. 4 deviations: once in 30,000 by chance."""
    assert texts.total() == N_SAMPLES
    assert chi_square_excess(texts, probabilities) < 4
    for i in range(N_TEXT):
        tokens: Counter[Text] = Counter()
        shares: dict[Text, float] = {}
        for text, probability in probabilities.items():
            tokens[text[i : i + 1]] += texts[text]
            shares[text[i : i + 1]] = shares.get(text[i : i + 1], 0) + probability
        assert chi_square_excess(tokens, shares) < 4, f"token {i + 1}"


def test_texts_of_plain_decoding_follow_the_distribution(
    small_model: SpeculationModel, probabilities: dict[Text, float]
) -> None:
    def decode(sampler: Any, root: int, position: int, n_max: int) -> list[int]:
        small_model.library.decode(small_model.context, [root], position)
        return [sampler.sample(small_model.context)]

    texts = sample_texts(small_model, decode)
    assert_drawn_from(texts, probabilities)
    # the test would see another temperature
    assert chi_square_excess(texts, text_probabilities(small_model, temperature=1.3)) > 10


@pytest.mark.parametrize("n_draft_experts", [1, 2])
def test_texts_of_accepted_drafts_follow_the_distribution(
    n_draft_experts: int, small_model: SpeculationModel, probabilities: dict[Text, float]
) -> None:
    speculator = small_model.speculator
    speculator.begin(EXACT | {"draft_experts": n_draft_experts})
    texts = sample_texts(small_model, speculator.step)
    report = speculator.report()
    assert report["n_accepted"] > N_SAMPLES / 4
    assert report["n_admitted"] > report["n_accepted"]
    assert_drawn_from(texts, probabilities)


def test_drafts_do_not_make_their_tokens_likelier() -> None:
    """What a sampler that prefers drafts would do: the test of distributions sees it."""
    probabilities = dict.fromkeys(itertools.product(range(2), repeat=4), 1 / 16)
    order = np.random.default_rng(1)
    fair = Counter(tuple(int(t) for t in row) for row in order.integers(0, 2, (N_SAMPLES, 4)))
    preferring = Counter(tuple(int(t) for t in row) for row in order.random((N_SAMPLES, 4)) < 0.515)
    assert chi_square_excess(fair, probabilities) < 4
    assert chi_square_excess(preferring, probabilities) > 4
