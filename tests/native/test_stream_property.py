"""Answers with reasoning and tool calls, cut anywhere: nothing depends on the cuts, and no tag leaks."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from s2moe.engine.native import ChatTemplate, Library, NativeAnswerParser
from s2moe.engine.stream.answer import AnswerStream, Delta

TEMPLATES = Path(__file__).parents[2] / "build/native/s2moe/source/models/templates"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")
# beginnings and ends of tags, which alone are ordinary text
FRAGMENTS = (
    "<",
    "</",
    "<tool",
    "think>",
    "call>",
    "<|im",
    "|>",
    "{",
    '"',
    "\\",
    "\n",
    "é",
    "🙂",
    " ",
    "a",
    "b",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "a tool",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "get_weather_of_week")
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)
calls = st.lists(
    st.tuples(
        st.sampled_from(("get_weather", "get_weather_of_week")),
        st.fixed_dictionaries({"city": texts}, optional={"days": st.integers(0, 9)}),
    ),
    max_size=2,
)
borders = st.lists(st.integers(0, 400), max_size=40)


@dataclass
class Answer:
    content: str = ""
    reasoning: str = ""
    names: dict[int, str] = field(default_factory=dict)
    arguments: dict[int, str] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        assert not delta.content or not self.names, "no text follows a call"
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.tool_calls:
            assert call.index in (len(self.names), len(self.names) - 1), "calls come one after the other"
            if call.index == len(self.names):
                self.names[call.index] = call.name
                assert call.name
            else:
                assert not call.name
            self.arguments[call.index] = self.arguments.get(call.index, "") + call.arguments


@dataclass
class Qwen:
    library: Library
    chat_json: bytes

    def read(self, raw: bytes, cuts: list[int]) -> Answer:
        parser = NativeAnswerParser(self.library, self.chat_json)
        try:
            stream, answer = AnswerStream([], parser), Answer()
            edges = sorted({0, len(raw), *(min(cut, len(raw)) for cut in cuts)})
            for start, end in pairwise(edges):
                answer.add(stream.feed(raw[start:end]))
            answer.add(stream.finish())
            return answer
        finally:
            parser.close()


@llama_cpp.llama_log_callback
def _discard_log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    pass


@pytest.fixture(scope="module")
def qwen(tiny_model_path: Path) -> Iterator[Qwen]:
    """Qwen3's template on the vocabulary of the demo model."""
    library = Library()
    llama_cpp.llama_log_set(_discard_log, ctypes.c_void_p(0))
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(tiny_model_path), parameters)
    assert model
    chat = ChatTemplate(library, model, (TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text())
    request: dict[str, Any] = {
        "messages": [{"role": "user", "content": "How warm is it?"}],
        "tools": TOOLS,
        "parallel_tool_calls": True,
    }
    yield Qwen(library, chat.apply(json.dumps(request).encode()))
    chat.close()
    llama_cpp.llama_model_free(model)


def written(reasoning: str, content: str, wanted: list[tuple[str, dict[str, Any]]]) -> bytes:
    """What a Qwen3 model writes."""
    raw = f"<think>\n{reasoning}\n</think>\n\n{content}"
    for name, arguments in wanted:
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        raw += f"\n<tool_call>\n{call}\n</tool_call>"
    return raw.encode()


@settings(max_examples=150, deadline=None)
@given(texts, texts, calls, borders)
def test_answer_is_taken_apart_right(
    qwen: Qwen, reasoning: str, content: str, wanted: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    raw = written(reasoning, content, wanted)
    assume(sum(raw.count(tag.encode()) for tag in TAGS) == 2 + 2 * len(wanted))
    # what an answer ends with and could have become a tag is not shown
    assume(wanted or not any(content.rstrip().endswith(tag[:n]) for tag in TAGS for n in range(1, len(tag))))
    answer = qwen.read(raw, cuts)
    assert answer.reasoning.strip() == reasoning.strip()
    assert answer.content.strip() == content.strip()
    seen = [(answer.names[index], json.loads(answer.arguments[index])) for index in answer.names]
    assert seen == wanted


@settings(max_examples=150, deadline=None)
@given(texts, texts, calls, borders, st.integers(0, 400))
def test_cuts_change_nothing_wherever_the_answer_ends(
    qwen: Qwen,
    reasoning: str,
    content: str,
    wanted: list[tuple[str, dict[str, Any]]],
    cuts: list[int],
    end: int,
) -> None:
    """`end`: an answer may stop within a tag, or within a character."""
    raw = written(reasoning, content, wanted)[:end]
    in_pieces, at_once = qwen.read(raw, cuts), qwen.read(raw, [])
    assert in_pieces == at_once


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS + TAGS), max_size=20).map("".join), borders)
def test_no_text_makes_the_parser_fail(qwen: Qwen, text: str, cuts: list[int]) -> None:
    qwen.read(text.encode(), cuts)
