"""Answers in the format of each family of templates, however they are cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from s2moe.engine.native import Library

from chat_families import FAMILIES, TAGS, Family
from chat_rig import (
    TIME,
    USER,
    WEATHER,
    Answer,
    apply,
    assert_any_cut_is_the_same,
    assert_no_markup,
    parse,
    template_text,
)

CONTENT = "Paris is <em>sunny</em> & 20° [today]: {warm} – ok?"
PLAIN = "Sure, I look."
REASONING = "The user asks for <b>weather</b>.\n\nI should look it up, 50 < 60."
PARIS = ("get_weather", {"city": 'Paris "Nord" <b>', "days": 2})
UTC = ("get_weather_time", {"zone": "UTC"})


THINKERS = [name for name, family in FAMILIES.items() if family.thought is not None]
PARALLEL = [name for name, family in FAMILIES.items() if family.parallel]
TALKERS = [name for name, family in FAMILIES.items() if family.content_before_calls is not None]


def chat_of(library: Library, family: Family, **options: Any) -> bytes:
    return apply(library, template_text(family.template), **family.options, **options)


def with_tools(library: Library, family: Family) -> bytes:
    return chat_of(library, family, tools=[WEATHER, TIME], parallel_tool_calls=True)


def assert_calls(answer: Answer, family: Family, *expected: tuple[str, dict[str, Any]]) -> None:
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == list(expected)
    for i, call in enumerate(answer.calls):
        assert call.id == (family.ids(i, call.name) if family.ids else "")


def test_content(library: Library, family: Family) -> None:
    answer = assert_any_cut_is_the_same(library, chat_of(library, family), family.answer(CONTENT))
    assert answer.content.strip() == CONTENT
    assert answer.reasoning == ""
    assert answer.calls == []


def test_content_where_calls_are_possible(library: Library, family: Family) -> None:
    answer = assert_any_cut_is_the_same(library, with_tools(library, family), family.answer(CONTENT))
    assert answer.content.strip() == CONTENT
    assert answer.calls == []


@pytest.mark.parametrize("family", THINKERS, indirect=True)
def test_reasoning(library: Library, family: Family) -> None:
    text = family.answer(CONTENT, REASONING)
    for chat in (chat_of(library, family), with_tools(library, family)):
        answer = assert_any_cut_is_the_same(library, chat, text)
        assert (answer.content.strip(), answer.reasoning.strip()) == (CONTENT, REASONING)


@pytest.mark.parametrize("family", THINKERS, indirect=True)
def test_reasoning_that_is_cut_off(library: Library, family: Family) -> None:
    assert family.thought is not None
    text = family.thought[0] + REASONING
    answer = assert_any_cut_is_the_same(library, chat_of(library, family), text)
    assert (answer.content, answer.reasoning.strip()) == ("", REASONING)


def test_one_call(library: Library, family: Family) -> None:
    reasoning = REASONING if family.thought is not None else ""
    text = family.answer(reasoning=reasoning, calls=[PARIS])
    answer = assert_any_cut_is_the_same(library, with_tools(library, family), text)
    assert_calls(answer, family, PARIS)
    assert (answer.content.strip(), answer.reasoning.strip()) == ("", reasoning)


@pytest.mark.parametrize("family", PARALLEL, indirect=True)
def test_two_calls(library: Library, family: Family) -> None:
    text = family.answer(calls=[PARIS, UTC])
    answer = assert_any_cut_is_the_same(library, with_tools(library, family), text)
    assert_calls(answer, family, PARIS, UTC)
    assert answer.content.strip() == ""


@pytest.mark.parametrize("family", PARALLEL, indirect=True)
def test_only_one_call_where_more_are_not_wanted(library: Library, family: Family) -> None:
    chat = chat_of(library, family, tools=[WEATHER, TIME], parallel_tool_calls=False)
    answer = assert_any_cut_is_the_same(library, chat, family.answer(calls=[UTC, PARIS]))
    assert [call.name for call in answer.calls] == ["get_weather_time"]
    assert json.loads(answer.calls[0].arguments) == UTC[1]
    assert_no_markup(answer, family)


@pytest.mark.parametrize("family", TALKERS, indirect=True)
def test_content_before_calls(library: Library, family: Family) -> None:
    calls = [PARIS, UTC] if family.parallel else [UTC]
    answer = assert_any_cut_is_the_same(
        library, with_tools(library, family), family.answer(PLAIN, calls=calls)
    )
    assert answer.content.strip() == PLAIN
    assert_calls(answer, family, *calls)


def test_answers_that_are_cut_off_leak_no_markup(library: Library, family: Family) -> None:
    """Cut by length at every character: what is given is the beginning of what the whole answer gives."""
    chat = with_tools(library, family)
    text = family.answer(
        PLAIN if family.content_before_calls is not None else "",
        "I see." if family.thought is not None else "",
        [PARIS],
    )
    whole = parse(library, chat, [text])
    for end in range(len(text)):
        answer = parse(library, chat, text[:end])
        for tag in (*TAGS, *family.markup):
            assert tag not in answer.content, text[:end]
            assert tag not in answer.reasoning, text[:end]
        # a character that may have begun a tag counts as text
        assert whole.reasoning.startswith(answer.reasoning[:-1]), text[:end]
        assert whole.content.startswith(answer.content[:-1]), text[:end]
        if answer.calls:
            assert answer.calls[0].name == "get_weather"
            assert whole.calls[0].arguments.startswith(answer.calls[0].arguments), text[:end]


def test_required_calls_parse_like_free_ones(library: Library, family: Family) -> None:
    chat = chat_of(library, family, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=True)
    assert json.loads(chat)["grammar"]
    assert json.loads(chat)["grammar_lazy"] is False
    answer = assert_any_cut_is_the_same(library, chat, family.answer(calls=[PARIS]))
    assert_calls(answer, family, PARIS)


def test_structured_content(library: Library, family: Family) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["city", "tags"],
        "additionalProperties": False,
    }
    value = '{"city": "Zürich <b>", "tags": ["a", "b]"]}'
    reasoning = REASONING if family.thought is not None else ""
    chat = chat_of(library, family, json_schema=schema)
    assert json.loads(chat)["grammar"]
    text = family.answer(value, reasoning)
    if family.content[0] == "<response>":
        text = text.replace("<response>", "").replace("</response>", "")
    answer = assert_any_cut_is_the_same(library, chat, text)
    assert json.loads(answer.content) == json.loads(value)
    assert answer.reasoning.strip() == reasoning


def test_a_call_or_structured_content(library: Library, family: Family) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    chat = chat_of(library, family, json_schema=schema, tools=[WEATHER], parallel_tool_calls=True)
    assert json.loads(chat)["grammar_lazy"] is False
    reasoning = "I think." if family.thought is not None else ""
    called = assert_any_cut_is_the_same(library, chat, family.answer(reasoning=reasoning, calls=[PARIS]))
    assert_calls(called, family, PARIS)
    assert called.content.strip() == ""
    said = family.answer('{"city": "Oslo"}', reasoning)
    if family.content[0] == "<response>":
        said = said.replace("<response>", "").replace("</response>", "")
    answer = assert_any_cut_is_the_same(library, chat, said)
    assert json.loads(answer.content) == {"city": "Oslo"}
    assert (answer.calls, answer.reasoning.strip()) == ([], reasoning)


def test_the_prompt_tells_of_the_tools_and_holds_the_history(library: Library, family: Family) -> None:
    call_id = "abcdef123"  # as Mistral wants it
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Bern", "days": 1}'},
    }
    messages = [
        {"role": "user", "content": "How is Bern?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "It rains cats."},
    ]
    chat = json.loads(chat_of(library, family, messages=messages, tools=[WEATHER, TIME]))
    for text in ("get_weather_time", "How is Bern?", "Bern", "It rains cats."):
        assert text in chat["prompt"]
    assert "get_weather" not in json.loads(chat_of(library, family))["prompt"]
    silent = json.loads(chat_of(library, family, tools=[WEATHER], tool_choice="none"))
    assert "get_weather" not in silent["prompt"]
    assert silent["grammar"] == ""


NO_CONTENT_BESIDE_CALLS = ("hermes-3", "gpt-oss", "llama-3.1", "llama-3.3", "mistral-nemo")
"""Their templates leave out what was said beside calls, gpt-oss's where there is reasoning."""
NO_CALLS_BESIDE_CONTENT = ("deepseek-r1",)
SHOWN_REASONING = ("qwen3", "qwen3-no-thinking", "gpt-oss", "ministral-3", "minimax-m2", "glm-4.6")
"""Their templates show the reasoning of the turn that has not ended yet."""


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_content_and_calls_of_one_message_are_rendered(library: Library, name: str) -> None:
    """No template fails at the three together, and each is in the prompt unless the template omits it."""
    call_id = "abcdef123"
    function = {"name": "get_weather", "arguments": '{"city": "Zermatt", "days": 1}'}
    said = {
        "role": "assistant",
        "content": "I look it up.",
        "reasoning_content": "They want to ski.",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": call_id, "content": "It snows."}
    chat = chat_of(library, FAMILIES[name], messages=[*USER, said, result], tools=[WEATHER, TIME])
    prompt = json.loads(chat)["prompt"]
    assert ("I look it up." in prompt) is (name not in NO_CONTENT_BESIDE_CALLS)
    assert ("Zermatt" in prompt) is (name not in NO_CALLS_BESIDE_CONTENT)
    assert ("They want to ski." in prompt) is (name in SHOWN_REASONING)
    assert "It snows." in prompt


def test_a_message_is_continued(library: Library, family: Family) -> None:
    messages = [*USER, {"role": "assistant", "content": "Once upon a"}]
    chat = chat_of(library, family, messages=messages, continue_final_message=True)
    assert json.loads(chat)["prompt"].endswith("Once upon a")
    answer = assert_any_cut_is_the_same(library, chat, " time, there was <b>.")
    assert (answer.content, answer.reasoning) == (" time, there was <b>.", "")
