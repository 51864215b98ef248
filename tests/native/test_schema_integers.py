"""Bounds of integers in JSON schemas hold up to the ends of int64."""

from __future__ import annotations

import json
import random

import pytest

from s2moe.engine.native import Library

from chat_rig import GrammarOracle, apply, template_text
from llama_model import LlamaModel
from schema_rig import Schema, chat_of, field, refusal_of, tool

BOUNDS = [
    *(0, 1, 5, 9, 10, 18, 100, 205, 1900, 2005, 10**14, 10**15 + 7, 10**16 - 1, 10**16, 2**53),
    *(10**18, 5 * 10**18 + 1, 2**63 - 2),
]


def near(bound: int) -> set[int]:
    """Integers around a bound, and those that have some of its digits."""
    digits = str(abs(bound))
    shorter = {int(digits[:k]) for k in range(1, len(digits))}
    longer = {int(digits + "0")} if len(digits) < 16 else set()
    around = {bound - 1, bound, bound + 1, 2 * bound, 0, 1, -1}
    return around | {sign * each for each in shorter | longer for sign in (1, -1)}


def assert_bounded(model: LlamaModel, chat: bytes, low: int | None, high: int | None) -> None:
    oracle = GrammarOracle.of_chat(model, chat)
    for number in set().union(*(near(bound) for bound in (low, high) if bound is not None)):
        is_within = (low is None or number >= low) and (high is None or number <= high)
        # without a bound in its direction, a number has up to 16 digits
        if is_within and len(str(abs(number))) > 16 and (low is None or high is None):
            continue
        if abs(number) <= 2**63 - 2:
            assert oracle.allows(f'{{"x": {number}}}') == is_within, number
        assert not oracle.allows(f'{{"x": 0{number}}}')
        assert not oracle.allows(f'{{"x": -0{abs(number) or 1}}}')


@pytest.mark.parametrize("bound", [*BOUNDS, *(-bound for bound in BOUNDS[1:])])
def test_integer_is_within_one_bound(library: Library, model: LlamaModel, bound: int) -> None:
    for keyword, low, high in (("minimum", bound, None), ("maximum", None, bound)):
        chat = chat_of(library, field({"type": "integer", keyword: bound}))
        assert json.loads(chat)["unenforced"] == []
        assert_bounded(model, chat, low, high)


def test_integer_is_within_two_bounds(library: Library, model: LlamaModel) -> None:
    choices = random.Random(5)
    for _ in range(40):
        low, high = sorted(choices.choice((1, -1)) * choices.choice(BOUNDS) for _ in range(2))
        chat = chat_of(library, field({"type": "integer", "minimum": low, "maximum": high}))
        assert json.loads(chat)["unenforced"] == []
        assert_bounded(model, chat, low, high)


EXCLUSIVE: dict[str, tuple[Schema, int | None, int | None]] = {
    "from below": ({"exclusiveMinimum": 2**53}, 2**53 + 1, None),
    "from above": ({"exclusiveMaximum": -100}, None, -101),
    "a fraction from below": ({"exclusiveMinimum": 2.5}, 3, None),
    "a fraction from above": ({"exclusiveMaximum": 2.5}, None, 2),
    "inclusive fractions": ({"minimum": 2.5, "maximum": 4.5}, 3, 4),
    "both kinds, the inclusive one is tighter": ({"minimum": 7, "exclusiveMinimum": 3}, 7, None),
    "both kinds, the exclusive one is tighter": ({"maximum": 7, "exclusiveMaximum": 3}, None, 2),
    "draft 4": ({"minimum": 3, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False}, 4, 9),
    "ends of int64": ({"minimum": -(2**63), "maximum": 2**63 - 1, "exclusiveMinimum": 4}, 5, None),
    "beyond int64": ({"minimum": 5, "maximum": 10**30}, 5, None),
    "as fractions": ({"minimum": -1e300, "maximum": 1e15}, None, 10**15),
}


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_bounds_of_all_kinds_are_joined(library: Library, model: LlamaModel, name: str) -> None:
    limits, low, high = EXCLUSIVE[name]
    chat = chat_of(library, field({"type": "integer"} | limits))
    assert json.loads(chat)["unenforced"] == []
    assert_bounded(model, chat, low, high)


@pytest.mark.parametrize(
    ("key", "bound"),
    [
        ("minimum", 2**63 - 1),
        ("minimum", 2**63),
        ("minimum", 10**30),
        ("minimum", 1e30),
        ("exclusiveMinimum", 2**63 - 2),
        ("maximum", -(2**63)),
        ("maximum", -1e19),
        ("exclusiveMaximum", -(2**63 - 2)),
    ],
)
def test_bound_that_leaves_no_integer_is_refused(library: Library, key: str, bound: float) -> None:
    message = refusal_of(library, field({"type": "integer", key: bound}))
    assert message.startswith(f"json_schema at #/properties/x: {key} leaves none of the integers")
    parameters = field({"type": "integer", key: bound})
    chat = json.loads(apply(library, template_text("Qwen-Qwen3-0.6B"), tools=[tool(parameters)]))
    assert chat["unenforced"] == [f"tools[0].function.parameters at #/properties/x: {key}"]
