"""What a grammar lets follow, token by token, against the texts that it stands for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import pytest

from llama_model import LlamaModel

WORDS = ["the", "then", "other", "äther", "日本", "日曜", "a", "in", "into", "éé", "", "x\ny"]


@pytest.fixture(scope="module")
def model(random_model: Callable[[str], Path]) -> Iterator[LlamaModel]:
    with LlamaModel(random_model("qwen3moe"), n_ctx=64) as model:
        yield model


def piece_of(model: LlamaModel, token: int) -> bytes:
    buffer = ctypes.create_string_buffer(256)
    n = llama_cpp.llama_token_to_piece(model.vocab, token, buffer, len(buffer), 0, True)
    return buffer.raw[:n]


class Follower:
    """llama.cpp's grammar sampler, asked about the whole vocabulary."""

    def __init__(self, model: LlamaModel, grammar: str) -> None:
        self._model = model
        self._sampler = llama_cpp.llama_sampler_init_grammar(model.vocab, grammar.encode(), b"root")
        assert self._sampler

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._sampler)

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self._sampler, token)

    def allowed(self) -> set[int]:
        n = self._model.n_vocab
        data = (llama_cpp.llama_token_data * n)()
        for token in range(n):
            data[token].id = token
        array = llama_cpp.llama_token_data_array(data, n, -1, False)
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return {entry.id for entry in data if entry.logit == 0.0}


def literal(text: str) -> str:
    return '"' + text.replace("\n", "\\n") + '"'


@pytest.mark.parametrize("n_others", [0, 4, 5, 300])
def test_tokens_that_may_follow_are_the_beginnings_of_what_is_left(model: LlamaModel, n_others: int) -> None:
    """Few alternatives and many are searched in two ways."""
    words = [*WORDS, *(f"{n}th" for n in range(n_others))]
    pieces = {token: piece_of(model, token) for token in range(model.n_vocab)}
    ends = {token for token in pieces if llama_cpp.llama_vocab_is_eog(model.vocab, token)}
    checked = 0
    for word in WORDS:
        follower = Follower(model, "root ::= (" + " | ".join(map(literal, words)) + ') "."')
        said = b""
        for token in [*model.tokenize(word), *model.tokenize(".")]:
            left = {
                (other + ".").encode()[len(said) :]
                for other in words
                if (other + ".").encode().startswith(said)
            }
            expected = {
                each
                for each, piece in pieces.items()
                if each not in ends and piece and any(rest.startswith(piece) for rest in left)
            }
            assert follower.allowed() == expected, (word, said)
            follower.accept(token)
            said += pieces[token]
            checked += 1
        assert follower.allowed() == ends
        follower.close()
    assert checked > 30
