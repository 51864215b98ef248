"""Log probabilities against numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from s2moe.engine.native import Library, NativeError, Status

from llama_model import LlamaModel

TOKENS = [40, 50, 60, 70]


@pytest.fixture(scope="module")
def model(random_model: Callable[[str], Path]) -> Iterator[LlamaModel]:
    with LlamaModel(random_model("qwen3moe")) as model:
        yield model


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_logprobs_are_a_log_softmax(library: Library, model: LlamaModel) -> None:
    rows = model.logits(TOKENS)
    for index, row in enumerate(rows):
        expected = log_softmax(row)
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        for token in (0, 5, order[0], order[-1]):
            logprob, top = library.logprobs(model._context, index, token, 20)
            assert logprob == pytest.approx(expected[token], abs=1e-5)
            assert [token for token, _ in top] == order[:20]
            assert [value for _, value in top] == pytest.approx(expected[order[:20]], abs=1e-5)
    assert library.logprobs(model._context, -1, 0, 1) == library.logprobs(model._context, 3, 0, 1)
    total = sum(np.exp(library.logprobs(model._context, 0, t, 0)[0]) for t in range(model.n_vocab))
    assert total == pytest.approx(1, abs=1e-4)


def logits_of(model: LlamaModel, index: int) -> npt.NDArray[np.float32]:
    """The row itself, to be written to."""
    row = llama_cpp.llama_get_logits_ith(model._context, index)
    return np.ctypeslib.as_array(row, shape=(model.n_vocab,))


def test_of_equal_tokens_the_smaller_id_comes_first(library: Library, model: LlamaModel) -> None:
    model.logits(TOKENS)
    row = logits_of(model, 0)
    row[:] = -20.0
    row[[250, 7, 100]] = 3.0
    logprob, top = library.logprobs(model._context, 0, 7, 4)
    assert [token for token, _ in top] == [7, 100, 250, 0]
    assert logprob == pytest.approx(np.log(1 / 3), abs=1e-4)


def test_impossible_tokens_are_finite(library: Library, model: LlamaModel) -> None:
    model.logits(TOKENS)
    row = logits_of(model, 0)
    row[:] = -np.inf
    row[5] = 80.0
    assert library.logprobs(model._context, 0, 6, 2) == (-9999.0, [(5, 0.0), (0, -9999.0)])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_are_an_error(library: Library, model: LlamaModel, value: float) -> None:
    model.logits(TOKENS)
    logits_of(model, 0)[9] = value
    with pytest.raises(NativeError) as caught:
        library.logprobs(model._context, 0, 0, 5)
    assert caught.value.status == Status.NUMERIC


def test_arguments_are_checked(library: Library, model: LlamaModel) -> None:
    model.logits(TOKENS)
    for index, token, n_top in ((len(TOKENS), 0, 0), (0, -1, 0), (0, model.n_vocab, 0), (0, 0, 101)):
        with pytest.raises(NativeError) as caught:
            library.logprobs(model._context, index, token, n_top)
        assert caught.value.status == Status.INVALID
    with pytest.raises(NativeError, match="n_top"):
        library.logprobs(model._context, 0, 0, 101)
    assert library.logprobs(model._context, 0, 0, 0)[1] == []
