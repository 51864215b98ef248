"""Answers that do not keep to their format, and the cost of long ones."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2moe.engine.native import Library, NativeAnswerParser, NativeError

from chat_families import FAMILIES
from chat_rig import TIME, WEATHER, apply, assert_any_cut_is_the_same, parse, template_text

LIBRARY = Library()
CHATS: dict[str, bytes] = {}


def chat_of(name: str, *, tools: bool = True) -> bytes:
    key = f"{name} {tools}"
    if key not in CHATS:
        options = {"tools": [WEATHER, TIME], "parallel_tool_calls": True} if tools else {}
        family = FAMILIES[name]
        CHATS[key] = apply(LIBRARY, template_text(family.template), **family.options, **options)
    return CHATS[key]


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "days": 1}}\n</tool_call>'
QWEN3: dict[str, tuple[str, str, str, int]] = {
    # text: content, reasoning, number of calls
    "tag at the end": ("1 <", "1 <", "", 0),
    "long tag at the end": ("1 <tool_ca", "1 ", "", 0),
    "other tag": ("1 <tool>x</tool>", "1 <tool>x</tool>", "", 0),
    "unknown function": ('Hm <tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>', "Hm ", "", 0),
    "call that is no JSON": ("Hm <tool_call>\nget_weather(Bern)\n</tool_call> so", "Hm ", "", 0),
    "text behind a call": (CALL + "\nThere you are.", "", "", 1),
    "thought behind a call": (CALL + "<think>x</think>", "", "", 1),
    "wrong arguments": ('<tool_call>\n{"name": "get_weather", "arguments": [}', "", "", 0),
    "thought within content": ("a <think>b</think>", "a b", "", 0),
    "end of thought only": ("a</think>\n\nb", "a\n\nb", "", 0),
    "tag at the end of a thought": ("<think>\na <", "", "a <", 0),
    "long tag at the end of a thought": ("<think>\na </thin", "", "a ", 0),
    "nothing": ("", "", "", 0),
    "blank": (" \n", "", "", 0),
    "empty thought": ("<think>\n\n</think>\n\nHi", "Hi", "", 0),
}


@pytest.mark.parametrize("name", QWEN3)
def test_what_qwen3_should_not_write(name: str) -> None:
    text, content, reasoning, n_calls = QWEN3[name]
    if text:
        answer = assert_any_cut_is_the_same(LIBRARY, chat_of("qwen3"), text)
    else:
        answer = parse(LIBRARY, chat_of("qwen3"), [])
    assert (answer.content, answer.reasoning, len(answer.calls)) == (content, reasoning, n_calls)


def test_braces_of_content_are_no_calls_of_llama() -> None:
    for text in ("Use {x} and {}.", '{"a": 1}', "{", "A {"):
        answer = assert_any_cut_is_the_same(LIBRARY, chat_of("llama-3.1"), text)
        assert (answer.content, answer.calls) == (text, [])


def test_harmony_without_headers_is_content() -> None:
    answer = assert_any_cut_is_the_same(LIBRARY, chat_of("gpt-oss"), "Hello there.")
    assert (answer.content, answer.reasoning) == ("Hello there.", "")


def test_harmony_that_breaks_off_its_headers_shows_none() -> None:
    for text in ("<|channel|>fin", "<|channel|>analysis<|message|>I", "<|channel|>commentary to=functions."):
        answer = assert_any_cut_is_the_same(LIBRARY, chat_of("gpt-oss"), text)
        assert answer.content == ""
        assert answer.calls == []


@pytest.mark.parametrize("depth", [100, 5000, 100_000])
def test_deep_answers_do_not_overflow_the_stack(depth: int) -> None:
    chat = chat_of("qwen3")
    arguments = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x", "days": ' + "[" * depth
    for text in (arguments, "[" * depth, "{" * depth, '{"a":' * depth):
        parse(LIBRARY, chat, [text[i : i + 10_000] for i in range(0, len(text), 10_000)])
    schema = apply(LIBRARY, template_text("olmoe"), json_schema={})
    for text in ("[" * depth, '{"a":' * depth):
        answer = parse(LIBRARY, schema, [text])
        assert answer.content == text


PIECES = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "\n", " ", "<tool_call>", "</tool_call>", '{"name": ', '"get_weather"'),
            *(', "arguments": ', '{"city": "B", "days": 1}', "}", "{", "[", "word", "<", "</", "é", '"'),
            *(
                "<|channel|>",
                "analysis",
                "final",
                "<|message|>",
                "<|end|>",
                "<|start|>assistant",
                "commentary",
            ),
            *(" to=functions.get_weather", "[TOOL_CALLS]", "[ARGS]", "<parameter=city>", "</parameter>"),
            *("<function=get_weather>", "</function>"),
        ]
    ),
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["qwen3", "gpt-oss", "qwen3-coder", "ministral-3", "llama-3.1", "deepseek-r1", "olmoe"]),
    PIECES,
    st.lists(st.integers(0, 200), max_size=5),
)
def test_any_text_in_any_pieces_is_the_same(name: str, parts: list[str], borders: list[int]) -> None:
    text = "".join(parts)
    cuts = sorted({0, len(text), *(border for border in borders if border < len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(cuts)]
    whole = parse(LIBRARY, chat_of(name), [text])
    assert parse(LIBRARY, chat_of(name), pieces) == whole
    assert parse(LIBRARY, chat_of(name), text) == whole
    for tag in ("<tool_call>", "<|channel|>", "<|message|>", "[TOOL_CALLS]"):
        if tag in json.loads(chat_of(name))["markers"]:
            assert tag not in whole.content


def test_long_reasoning_takes_linear_time() -> None:
    words = ["word" if i % 10 else ".\n\nNext" for i in range(20_000)]
    started = time.monotonic()
    answer = parse(LIBRARY, chat_of("qwen3"), ["<think>\n", *(f" {word}" for word in words)])
    assert len(answer.reasoning) > 80_000
    assert time.monotonic() - started < 20


def test_chat_json_must_be_that_of_a_chat() -> None:
    for text in (b"", b"{}", b"[]", b'{"format_id": 1}'):
        with pytest.raises(NativeError):
            NativeAnswerParser(LIBRARY, text)
