"""Answers in the format of each family of templates, from tokens to what a client gets: bytes, control
tokens, stop strings, the library's parser, ids and the reason of the end."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest

from s2moe.engine.native import Library

from chat_families import Family
from chat_rig import TIME, WEATHER, assert_no_markup
from scripted_model import answer_of

CONTENT = "It is 20° in Zürich 🙂, <b>sunny</b> & calm."
REASONING = "They ask for the weather: 50 < 60 – I should look."
PARIS = ("get_weather", {"city": "Zürich 🙂 <b>", "days": 2})
UTC = ("get_weather_time", {"zone": "UTC"})
NEVER = "never said"
"""A stop string that begins like nothing else, but has the filter on the way."""
OWN_ID = re.compile("call_[A-Za-z0-9]{24}")


def test_content(library: Library, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    reasoning = REASONING if family.thought is not None else ""
    for seed, stop in product(range(3), [(), (NEVER,)]):
        text = family.answer(CONTENT, reasoning)
        answer, end = answer_of(library, family, monkeypatch, text, seed=seed, stop=stop)
        assert (answer.content.strip(), answer.reasoning.strip()) == (CONTENT, reasoning)
        assert (end.reason, end.stop_string) == ("stop", None)


def test_stop_string_within_the_content(
    library: Library, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        text = family.answer(CONTENT)
        answer, end = answer_of(library, family, monkeypatch, text, seed=seed, stop=("🙂, <b>",))
        assert answer.content.strip() == "It is 20° in Zürich"
        assert (end.reason, end.stop_string) == ("stop", "🙂, <b>")


@pytest.mark.parametrize("stop", [(), (NEVER,)], ids=["no stop", "stop"])
def test_calls(
    library: Library, family: Family, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]
) -> None:
    calls = [PARIS, UTC] if family.parallel else [PARIS]
    content = CONTENT if family.content_before_calls is not None else ""
    reasoning = REASONING if family.thought is not None else ""
    text = family.answer(content, reasoning, calls)
    for seed in range(3):
        answer, end = answer_of(
            library,
            family,
            monkeypatch,
            text,
            seed=seed,
            stop=stop,
            tools=[WEATHER, TIME],
            parallel_tool_calls=True,
        )
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
        assert (answer.content.strip(), answer.reasoning.strip()) == (content, reasoning)
        assert_no_markup(answer, family)
        assert end.reason == "tool_calls"
        assert len({call.id for call in answer.calls}) == len(calls)
        for i, call in enumerate(answer.calls):
            assert call.id == family.ids(i, call.name) if family.ids else OWN_ID.fullmatch(call.id)


def test_calls_of_a_later_choice_have_ids_of_their_own(
    library: Library, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = family.answer(calls=[PARIS])
    answer, _ = answer_of(
        library, family, monkeypatch, text, own_call_ids=True, tools=[WEATHER], parallel_tool_calls=True
    )
    assert [OWN_ID.fullmatch(call.id) is not None for call in answer.calls] == [True]
