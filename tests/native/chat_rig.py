"""Chat templates without a model, and answers fed to their parsers in pieces."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from s2moe.engine.native import ChatTemplate, Library, NativeAnswerParser
from s2moe.engine.stream.answer import Delta

from chat_families import TAGS, Family
from llama_model import LlamaModel

REPOSITORY = Path(__file__).parents[2]
SHIPPED = REPOSITORY / "build" / "native" / "s2moe" / "source" / "models" / "templates"
"""The template files of the pinned llama.cpp."""
OWN = REPOSITORY / "tests" / "data" / "templates"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "days": {"type": "integer", "description": "How far ahead."},
            },
            "required": ["city", "days"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_weather_time",  # begins with the name of the other
        "description": "The time of a zone.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "description": "Its name."}},
            "required": ["zone"],
        },
    },
}
USER = [{"role": "user", "content": "Hello"}]


def template_text(name: str) -> str:
    """A template of tests/data/templates, or else one that llama.cpp ships."""
    own = OWN / f"{name}.jinja"
    if own.exists():
        return own.read_text()
    if not SHIPPED.exists():
        pytest.skip(f"{SHIPPED} is missing: `make setup` unpacks llama.cpp")
    return (SHIPPED / f"{name}.jinja").read_text()


def apply(
    library: Library,
    source: str,
    *,
    messages: Any = USER,
    model: Any = None,
    **options: Any,
) -> bytes:
    """What s2moe_chat_apply() returns. Without a model there are no names of BOS and EOS."""
    chat = ChatTemplate(library, model, source)
    try:
        return chat.apply(json.dumps({"messages": messages, **options}).encode())
    finally:
        chat.close()


@dataclass
class Call:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Answer:
    """Deltas put together, as a client does it, and checked for the rules that clients rely on."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        if delta.content:
            assert not self.calls, "content behind a call"
        self.content += delta.content
        self.reasoning += delta.reasoning
        for piece in delta.tool_calls:
            if piece.index == len(self.calls):
                assert piece.name, "a call begins with its name"
                self.calls.append(Call(piece.id, piece.name))
            else:
                assert piece.index == len(self.calls) - 1, "pieces of calls are in order"
                assert not piece.name, "the name came twice"
                assert not piece.id, "the id came twice"
                assert piece.arguments, "an empty piece"
            self.calls[-1].arguments += piece.arguments


def parse(library: Library, chat_json: bytes, pieces: Iterable[str]) -> Answer:
    """Feeds the pieces and ends the answer."""
    parser = NativeAnswerParser(library, chat_json)
    answer = Answer()
    try:
        for piece in pieces:
            answer.add(parser.feed(piece, final=False))
        answer.add(parser.feed("", final=True))
    finally:
        parser.close()
    return answer


def assert_any_cut_is_the_same(library: Library, chat_json: bytes, text: str) -> Answer:
    """Feeds a text whole, in two pieces cut at each place, and character by character."""
    whole = parse(library, chat_json, [text])
    assert parse(library, chat_json, text) == whole
    for cut in range(1, len(text)):
        assert parse(library, chat_json, [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])
    return whole


def assert_no_markup(answer: Answer, family: Family) -> None:
    for text in (*TAGS, *family.markup):
        assert text not in answer.content
        assert text not in answer.reasoning


class GrammarOracle:
    """Says which texts a grammar allows, by the vocabulary of a model that can spell anything."""

    def __init__(self, model: LlamaModel, grammar: str, prefix: str = "") -> None:
        """prefix: what the grammar is fed before the text. Raises ValueError: the grammar does not parse."""
        self._model = model
        self._grammar = grammar.encode()
        self._prefix = prefix
        if not self._create():
            raise ValueError("the grammar does not parse")

    @classmethod
    def of_chat(cls, model: LlamaModel, chat_json: bytes) -> GrammarOracle:
        chat = json.loads(chat_json)
        return cls(model, chat["grammar"], chat["generation_prompt"] or "")

    def _create(self) -> Any:
        return llama_cpp.llama_sampler_init_grammar(self._model.vocab, self._grammar, b"root")

    def start(self) -> Any:
        """A sampler at the beginning of a text. The caller frees it."""
        sampler = self._create()
        for token in self._model.tokenize(self._prefix) if self._prefix else ():
            llama_cpp.llama_sampler_accept(sampler, token)
        return sampler

    def allows(self, text: str, *, whole: bool = True) -> bool:
        """Whether the text is of the grammar. whole: False asks for a beginning of such a text."""
        sampler = self._create()
        try:
            for token in self._model.tokenize(self._prefix + text):
                if not self._may_follow(sampler, token):
                    return False
                llama_cpp.llama_sampler_accept(sampler, token)
            end = llama_cpp.llama_vocab_eos(self._model.vocab)
            return not whole or self._may_follow(sampler, end)
        finally:
            llama_cpp.llama_sampler_free(sampler)

    @staticmethod
    def _may_follow(sampler: Any, token: int) -> bool:
        data = (llama_cpp.llama_token_data * 1)(llama_cpp.llama_token_data(token, 0.0, 0.0))
        array = llama_cpp.llama_token_data_array(data, 1, -1, False)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        return bool(data[0].logit == 0.0)
