"""JSON schemas become grammars that mean the same, or errors that name the place."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from s2moe.engine.native import ChatTemplate, Library, NativeError, Status

from chat_rig import GrammarOracle, apply, template_text
from llama_model import LlamaModel
from schema_rig import Schema, chat_of, field, tool


def deep(levels: int) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BOMB = {f"b{i}": {"anyOf": [{"$ref": f"#/$defs/b{i + 1}"}] * 2} for i in range(30)} | {
    "b30": {"type": "string"}
}
REFUSED: dict[str, tuple[Any, str]] = {
    "type": (field({"type": "strin"}), '#/properties/x: type "strin" is unknown; use array'),
    "no type": (field({"type": []}), "#/properties/x: type must not be empty"),
    "not an object": ([], "#: must be an object"),
    "false": (field(False), "#/properties/x: false"),
    "pattern": (field({"type": "string", "pattern": "^(?!a).*$"}), "#/properties/x: pattern ^(?!a).*$"),
    "broken pattern": (field({"type": "string", "pattern": "^(a$"}), "#/properties/x: pattern"),
    "pattern is no string": (field({"pattern": 5}), "#/properties/x: pattern must be a string"),
    "unknown ref": (field({"$ref": "#/$defs/nothing"}), "#/properties/x: $ref #/$defs/nothing leads nowhere"),
    "foreign ref": (
        field({"$ref": "https://example.com/s.json"}),
        "#/properties/x: $ref https://example.com",
    ),
    "ref to no schema": (field({"$ref": "#/properties"}), "leads to what is no schema"),
    "ref that is a number": (field({"$ref": 5}), "#/properties/x: $ref must be a string"),
    "ref to itself": (
        field({"$ref": "#/$defs/a"}) | {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "#/properties/x: $ref leads back to itself",
    ),
    "allOf of itself": (
        {"allOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": {"$ref": "#/$defs/a"}}},
        "#/$defs/a: $ref #/$defs/a leads back to itself",
    ),
    "exponential": (field({"$ref": "#/$defs/b0"}) | {"$defs": BOMB}, "more than 4096 alternatives"),
    "not": (field({"not": {"type": "string"}}), "#/properties/x: not cannot"),
    "if": (field({"if": {}, "then": {}}), "#/properties/x: if cannot"),
    "patternProperties": ({"type": "object", "patternProperties": {"^a": {}}}, "#: patternProperties cannot"),
    "anyOf beside properties": (
        field({}) | {"anyOf": [{"required": ["x"]}]},
        "#: anyOf beside other keywords",
    ),
    "anyOf is no list": (field({"anyOf": {"type": "string"}}), "#/properties/x: anyOf must be a list"),
    "empty anyOf": (field({"anyOf": []}), "#/properties/x: anyOf must be a list"),
    "beside ref": (
        field({"$ref": "#/$defs/a", "minLength": 3}) | {"$defs": {"a": {"type": "string"}}},
        "#/properties/x: minLength beside $ref",
    ),
    "same type twice": (field({"type": ["object", "object"]}), "type must be a list of different names"),
    "negative count": (field({"type": "string", "minLength": -1}), "#/properties/x: minLength must be"),
    "count is no number": (field({"type": "string", "maxLength": "5"}), "#/properties/x: maxLength must be"),
    "min over max": (
        field({"type": "string", "minLength": 5, "maxLength": 4}),
        "minLength is more than maxLength",
    ),
    "no integer": (field({"type": "integer", "minimum": 5, "maximum": 4}), "#/properties/x: no integer"),
    "between": (field({"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 5}), "no integer lies"),
    "empty enum": (field({"enum": []}), "#/properties/x: enum must be a list"),
    "enum of another type": (field({"type": "integer", "enum": ["a"]}), "#/properties/x: enum has no value"),
    "const of another type": (field({"type": "string", "const": 5}), "#/properties/x: const has no value"),
    "const outside of enum": (
        field({"const": 5, "enum": [4]}),
        "#/properties/x: const is none of the values",
    ),
    "properties is a list": ({"type": "object", "properties": []}, "#: properties must be an object"),
    "required of others": ({"type": "object", "required": ["y"]}, "#: required names y"),
    "long name": ({"type": "object", "properties": {"_" * 300: {}}}, "#: a property's name is longer"),
    "optional": (
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
        "#: has more than 200 properties",
    ),
    "many optional": (
        {"anyOf": [{"properties": {f"p{i}": {} for i in range(190)}} for _ in range(10)]},
        "too many objects with many properties",
    ),
    "deep": (deep(60), "nested deeper than 48"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schema_is_refused_by_its_place(library: Library, name: str) -> None:
    schema, message = REFUSED[name]
    with pytest.raises(NativeError) as caught:
        chat_of(library, schema)
    assert caught.value.status == Status.GRAMMAR
    assert caught.value.message.startswith("json_schema")
    assert message in caught.value.message


@pytest.mark.parametrize("levels", [150, 20_000])
def test_depth_of_the_request_is_bounded(library: Library, levels: int) -> None:
    text = '{"messages": [{"role": "user", "content": "x"}], "json_schema": '
    text += '{"items": ' * levels + "{}" + "}" * levels + "}"
    chat = ChatTemplate(library, None, template_text("olmoe"))
    with pytest.raises(NativeError) as caught:
        chat.apply(text.encode())
    assert caught.value.status in (Status.GRAMMAR, Status.INVALID)
    assert "deeper" in caught.value.message
    chat.close()


def test_long_schema_is_refused(library: Library) -> None:
    with pytest.raises(NativeError, match="json_schema is longer than") as caught:
        chat_of(library, {"enum": ["x" * 1000 + str(i) for i in range(300)]})
    assert caught.value.status == Status.GRAMMAR


ALLOWED: dict[str, tuple[Any, list[str], list[str]]] = {
    "object": (
        field({"type": "string"}),
        ['{"x": "a"}', '{"x":"\\n\\u00e9"}', '{ "x": "" }'],
        ["{}", '{"x": 1}', '{"y": "a"}', '{"x": "a", "y": 1}', '"x"', "hello", '{"x": "a"'],
    ),
    "anything": ({}, ["1", '"a"', "[1, {}]", "null"], ["hello", ""]),
    "true": (field(True), ['{"x": [1]}', '{"x": null}'], ["{}"]),
    "object of anything": ({"type": "object"}, ["{}", '{"a": [1]}'], ["[]", '"a"']),
    "integer": (
        field({"type": "integer", "minimum": 3, "maximum": 12}),
        ['{"x": 3}', '{"x": 12}'],
        ['{"x": 2}', '{"x": 13}', '{"x": 3.5}'],
    ),
    "safe integers": (
        field({"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}),
        ['{"x": -5}', '{"x": 0}', '{"x": 9007199254740991}'],
        ['{"x": 9007199254740992}', '{"x": "5"}'],
    ),
    "enum": (field({"enum": ["a", 1, None]}), ['{"x": "a"}', '{"x": 1}', '{"x": null}'], ['{"x": "b"}']),
    "nullable": (field({"type": ["string", "null"]}), ['{"x": "a"}', '{"x": null}'], ['{"x": 1}']),
    "lengths": (
        field({"type": "string", "minLength": 2, "maxLength": 3.0}),
        ['{"x": "ab"}', '{"x": "abc"}'],
        ['{"x": "a"}', '{"x": "abcd"}'],
    ),
    "items": (
        field({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}),
        ['{"x": [true]}', '{"x": [true, false]}'],
        ['{"x": []}', '{"x": [true, true, true]}', '{"x": [1]}'],
    ),
    "tuple": (
        field({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False}),
        ['{"x": [1, null]}'],
        ['{"x": [1]}', '{"x": [null, 1]}'],
    ),
    "ref": (
        field({"$ref": "#/$defs/a", "description": "d"}) | {"$defs": {"a": {"const": 5}}},
        ['{"x": 5}'],
        ['{"x": 6}'],
    ),
    "one allOf": (
        field({"allOf": [{"$ref": "#/$defs/a"}], "title": "T"}) | {"$defs": {"a": {"const": 5}}},
        ['{"x": 5}'],
        ['{"x": 6}', '{"x": {}}'],
    ),
    "root ref": (
        {"$ref": "#/$defs/a", "$defs": {"a": field({"const": 5})}},
        ['{"x": 5}'],
        ['{"x": 6}', "5"],
    ),
    "recursive": (
        {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": False,
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                    "required": ["next"],
                    "additionalProperties": False,
                }
            },
        },
        ['{"next": null}', '{"next": {"next": {"next": null}}}'],
        ['{"next": 1}', "{}"],
    ),
    "date": (field({"type": "string", "format": "date"}), ['{"x": "2026-11-30"}'], ['{"x": "today"}']),
    "digits": (field({"type": "string", "pattern": r"^\d{2}-\w+$"}), ['{"x": "12-ab_"}'], ['{"x": "1-a"}']),
    "any characters": (
        field({"type": "string", "pattern": "^a.c$"}),
        ['{"x": "a-c"}', '{"x": "aéc"}'],
        ['{"x": "a"c"}', '{"x": "ac"}'],
    ),
    "unanchored": (
        field({"type": "string", "pattern": "b+"}),
        ['{"x": "abbc"}', '{"x": "b"}'],
        ['{"x": "ac"}', '{"x": ""}'],
    ),
    "negated class": (
        field({"type": "string", "pattern": "^[^@]+@[^@]+$"}),
        ['{"x": "a@b"}'],
        ['{"x": "a"b@c"}', '{"x": "a@b@c"}'],
    ),
    "choices": (
        field({"type": "string", "pattern": "^(a|bc)?[x-z]{2,}$"}),
        ['{"x": "bcxyz"}'],
        ['{"x": "bx"}'],
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_grammar_means_what_the_schema_says(library: Library, model: LlamaModel, name: str) -> None:
    schema, valid, invalid = ALLOWED[name]
    oracle = GrammarOracle.of_chat(model, chat_of(library, schema))
    for text in valid:
        assert oracle.allows(text), text
    for text in invalid:
        assert not oracle.allows(text), text


UNENFORCED: dict[str, Any] = {
    "minimum": {"type": "number", "minimum": 0},
    "exclusiveMaximum": {"type": "number", "exclusiveMaximum": 1.5},
    "multipleOf": {"type": "integer", "multipleOf": 5},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "format": {"type": "string", "format": "email"},
    "maxLength": {"type": "string", "maxLength": 5000},
    "minItems": {"type": "array", "items": {"type": "string"}, "minItems": 1000},
    "minProperties": {"type": "object", "minProperties": 1},
}


@pytest.mark.parametrize("key", UNENFORCED)
def test_what_no_grammar_holds_is_said(library: Library, key: str) -> None:
    chat = json.loads(chat_of(library, field(UNENFORCED[key])))
    assert chat["unenforced"] == [f"json_schema at #/properties/x: {key}"]


def test_nothing_is_said_where_all_is_enforced(library: Library) -> None:
    for schema, _, _ in ALLOWED.values():
        assert json.loads(chat_of(library, schema))["unenforced"] == []


def test_tools_lose_what_strict_ones_may_not(library: Library) -> None:
    source = template_text("Qwen-Qwen3-0.6B")
    parameters = field({"type": "string", "pattern": "^(?!a).*$"}) | {"anyOf": [{"required": ["x"]}]}
    chat = json.loads(apply(library, source, tools=[tool(parameters)]))
    assert chat["unenforced"] == [
        "tools[0].function.parameters at #: anyOf",
        "tools[0].function.parameters at #/properties/x: pattern",
    ]
    assert "tool-f" in chat["grammar"]
    with pytest.raises(NativeError, match=r"^tools\[0\]\.function\.parameters at #: anyOf") as caught:
        apply(library, source, tools=[tool(parameters, strict=True)])
    assert caught.value.status == Status.GRAMMAR


def test_bad_schemas_of_tools_are_refused_by_their_place(library: Library) -> None:
    source = template_text("Qwen-Qwen3-0.6B")
    for parameters in (
        field({"type": "strin"}),
        field({"$ref": "#/$defs/nothing"}),
        field(deep(60)),
        field({"minLength": -1}),
    ):
        with pytest.raises(NativeError, match=r"^tools\[1\]\.function\.parameters") as caught:
            apply(
                library,
                source,
                tools=[tool({}), tool(parameters, "g")],
            )
        assert caught.value.status == Status.GRAMMAR


def test_many_tools_take_no_time(library: Library, model: LlamaModel) -> None:
    properties = {f"p{i}": {"type": "string", "maxLength": 2000} for i in range(30)}
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": properties}},
        }
        for i in range(40)
    ]
    started = time.monotonic()
    chat = apply(library, template_text("Qwen-Qwen3-0.6B"), tools=tools, tool_choice="required")
    GrammarOracle.of_chat(model, chat)
    assert time.monotonic() - started < 10
