"""Schemas of a client, what libs2moe makes of them, and texts that the grammar lets through."""

from __future__ import annotations

import ctypes
import random
import string
from collections.abc import Mapping
from typing import Any

import llama_cpp
import pytest

from s2moe.engine.native import Library, NativeError, Status

from chat_rig import GrammarOracle, apply, template_text
from llama_model import LlamaModel

Schema = dict[str, Any]


def chat_of(library: Library, schema: Any) -> bytes:
    """What s2moe_chat_apply() says of a json_schema."""
    return apply(library, template_text("olmoe"), json_schema=schema)


def refusal_of(library: Library, schema: Any) -> str:
    """The message that refuses a json_schema."""
    with pytest.raises(NativeError) as caught:
        chat_of(library, schema)
    assert caught.value.status == Status.GRAMMAR
    return caught.value.message


def field(schema: Any) -> Schema:
    """An object with one property of this schema."""
    return {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "additionalProperties": False,
    }


def tool(parameters: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


class GrammarWriter:
    """Writes texts of a grammar at random, with a liking for their end."""

    _LIKED: Mapping[str, float] = {'"': 6, "}": 9, "]": 9, ",": 0.7, " ": 0.2, "\n": 0.1, "\\": 0.2}

    def __init__(self, model: LlamaModel, chat_json: bytes) -> None:
        self._model = model
        self._oracle = GrammarOracle.of_chat(model, chat_json)
        characters = string.printable[:95] + "\né"
        tokens = {character: model.tokenize(character) for character in characters}
        # the bytes of é follow each other, all others are characters of their own
        self._weights = {
            token: self._LIKED.get(character, 1.0 / len(each))
            for character, each in tokens.items()
            for token in each
        }
        self._end = llama_cpp.llama_vocab_eos(model.vocab)

    def write(self, choices: random.Random, n_max: int = 200) -> str | None:
        """None: it would be longer than n_max tokens, or needs other characters."""
        sampler = self._oracle.start()
        tokens: list[int] = []
        try:
            while len(tokens) < n_max:
                allowed = self._allowed(sampler)
                if self._end in allowed and (len(allowed) == 1 or choices.random() < 0.8):
                    return self._model.detokenize(tokens)
                allowed.discard(self._end)
                if not allowed:
                    return None
                population = sorted(allowed)
                (token,) = choices.choices(population, [self._weights[each] for each in population])
                llama_cpp.llama_sampler_accept(sampler, token)
                tokens.append(token)
            return None
        finally:
            llama_cpp.llama_sampler_free(sampler)

    def _allowed(self, sampler: Any) -> set[int]:
        tokens = [*self._weights, self._end]
        data = (llama_cpp.llama_token_data * len(tokens))(
            *(llama_cpp.llama_token_data(token, 0.0, 0.0) for token in tokens)
        )
        array = llama_cpp.llama_token_data_array(data, len(tokens), -1, False)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        return {data[i].id for i in range(len(tokens)) if data[i].logit == 0.0}
