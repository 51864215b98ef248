"""Each keyword of JSON schema is enforced, or told of with its place."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from s2moe.engine.native import Library, NativeError, Status

from chat_rig import GrammarOracle, apply, template_text
from llama_model import LlamaModel
from schema_rig import Schema, chat_of, field, refusal_of, tool

QWEN3 = "Qwen-Qwen3-0.6B"


def unenforced(library: Library, schema: Any) -> list[str]:
    """What is said of the schema of #/properties/x."""
    lost: list[str] = json.loads(chat_of(library, field(schema)))["unenforced"]
    return [each.removeprefix("json_schema at #/properties/x: ") for each in lost]


# ── what grammars hold ──────────────────────────────────────────────────────────────────────────

PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
ENFORCED: dict[str, tuple[Schema, list[Any], list[str]]] = {
    "type beside enum": ({"type": "string", "enum": ["a", None, 5]}, ["a"], ["null", "5"]),
    "types beside enum": ({"type": ["string", "null"], "enum": ["a", None, 5]}, ["a", None], ["5"]),
    "numbers beside enum": ({"type": "number", "enum": [1, 2.5, "a"]}, [1, 2.5], ['"a"']),
    "integers beside enum": ({"type": "integer", "enum": [1, 2.5]}, [1], ["2.5"]),
    "const beside enum": ({"const": 2, "enum": [1, 2]}, [2], ["1"]),
    "enum of everything": ({"enum": [None, True, 1, "a", [1], {"b": 2}]}, [None, True, 1, "a"], ["2", '"b"']),
    "type beside anyOf": (
        {"type": "integer", "anyOf": [{"maximum": -10}, {"minimum": 10}]},
        [-10, 10],
        ["5", '"a"', "10.5"],
    ),
    "type beside a reference": (
        {
            "type": "object",
            "anyOf": [{"type": "object", "properties": {"y": {"const": 1}}}, {"properties": {}}],
        },
        [{"y": 1}, {}],
        ['{"y": 2}', "1"],
    ),
    "oneOf by types": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], ["1.5"]),
    "oneOf by values": ({"oneOf": [{"const": 1}, {"enum": [2, 3]}]}, [1, 3], ["4"]),
    "oneOf by a constant": (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"enum": ["b", "c"]}}, "required": ["k"]},
            ]
        },
        [{"k": "a"}, {"k": "c"}],
        ['{"k": "d"}', "{}"],
    ),
    "oneOf by what is required": (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
                {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": False},
            ]
        },
        [{"a": 1}, {"b": 1}],
        ['{"a": 1, "b": 1}', "{}"],
    ),
    "allOf of different properties": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
                {"properties": {"b": {"const": 2}}, "required": ["b"]},
            ]
        },
        [{"a": 1, "b": 2}],
        ['{"a": 1}', '{"a": 2, "b": 2}'],
    ),
    "unevaluatedProperties of nothing else": (
        {"type": "object", "unevaluatedProperties": {"type": "integer"}},
        [{"a": 1}, {}],
        ['{"a": "b"}'],
    ),
    "unevaluatedProperties of a list": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        [{"a": 1}, {}],
        ['{"b": 1}'],
    ),
    "propertyNames of any name": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        [{"a": 1}],
        ['{"a": "b"}'],
    ),
    "empty rules": (
        {"type": "object", "patternProperties": {}, "dependentRequired": {}, "minProperties": 0},
        [{"a": 1}],
        ["1"],
    ),
    "counts of properties that always hold": (
        {
            "type": "object",
            "properties": {"a": {"const": 1}, "b": {"const": 2}},
            "required": ["a"],
            "minProperties": 1,
            "maxProperties": 2,
        },
        [{"a": 1}, {"a": 1, "b": 2}],
        ["{}"],
    ),
    "open object": (
        {"type": "object", "properties": {"a-b": {"const": 1}}, "additionalProperties": True},
        [{}, {"a-b": 1}, {"c": 2}, {"a-b": 1, "c": 2}],
        ['{"a-b": 2}', '{"\\d": 1}', '{"\n": 1}'],
    ),
    "counts of a tuple that fit": (
        {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 1, "maxItems": 5},
        [[1, 2]],
        ["[]", "[1, 2, 3]"],
    ),
    "limits of other types": (
        {
            "type": "string",
            "minimum": 3,
            "minItems": 3,
            "required": ["a"],
            "multipleOf": 3,
            "uniqueItems": True,
        },
        ["a"],
        ["1"],
    ),
    "true beside prefixItems": (
        {"type": "array", "prefixItems": [{"const": 1}], "items": True},
        [[1]],
        ["[2]"],
    ),
    "nullable is an annotation": ({"type": "string", "nullable": True}, ["a"], ["null"]),
    "range over quotes": (
        {"type": "string", "pattern": "^[ -~]+$"},
        ["a b", PRINTABLE.replace('"', "").replace("\\", "")],
        ['"a"b"', '"a\\d"', '"é"', '""'],
    ),
    "hexadecimal range": ({"type": "string", "pattern": r"^[\u00e0-\u00ff\x41]+$"}, ["éA"], ['"B"']),
    "no spaces": ({"type": "string", "pattern": r"^[^\s]$"}, ["a"], ['" "', '"\u00a0"']),
    "special characters of classes": (
        {"type": "string", "pattern": r"^[\]\[\-^.+*]+$"},
        ["]-[^.+*"],
        ['"a"'],
    ),
    "identical keywords beside a reference": (
        {"$ref": "#/$defs/a", "type": "object"},
        [{"b": 1}],
        ["{}", "1"],
    ),
}
DEFINITIONS = {"a": {"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"]}}


@pytest.mark.parametrize("name", ENFORCED)
def test_keyword_is_enforced(library: Library, model: LlamaModel, name: str) -> None:
    schema, valid, invalid = ENFORCED[name]
    whole = field(schema) | {"$defs": DEFINITIONS}
    chat = chat_of(library, whole)
    assert json.loads(chat)["unenforced"] == []
    oracle = GrammarOracle.of_chat(model, chat)
    for value in valid:
        assert jsonschema_rs.is_valid(whole, {"x": value}), value
        assert oracle.allows(json.dumps({"x": value}, ensure_ascii=False)), value
    for text in invalid:
        assert not oracle.allows(f'{{"x": {text}}}'), text


# ── what they do not hold ───────────────────────────────────────────────────────────────────────

UNENFORCED: dict[str, tuple[Any, list[str]]] = {
    "bounds of numbers": (
        {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        ["minimum", "exclusiveMaximum"],
    ),
    "bounds of numbers beside integers": ({"type": ["integer", "number"], "minimum": 5}, ["minimum"]),
    "bounds of anything": ({"minimum": 5}, ["minimum"]),
    "multipleOf": ({"type": "number", "multipleOf": 0.5}, ["multipleOf"]),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
    "minProperties": ({"type": "object", "minProperties": 1}, ["minProperties"]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, ["maxProperties"]),
    "counts of anything": ({"minItems": 1, "maxItems": 2}, ["minItems", "maxItems"]),
    "limits beside enum": (
        {"type": "string", "enum": ["a", "bcd"], "minLength": 2, "pattern": "^(?!a)"},
        ["pattern", "minLength"],
    ),
    "limits beside const": ({"const": 3, "minimum": 5, "multipleOf": 2}, ["minimum", "multipleOf"]),
    "format beside pattern": (
        {"type": "string", "pattern": "^2.*$", "format": "date"},
        ["format beside pattern"],
    ),
    "lengths beside pattern": (
        {"type": "string", "pattern": "^a*$", "minLength": 2, "maxLength": 3},
        ["minLength", "maxLength"],
    ),
    "lengths beside a format": ({"type": "string", "format": "date", "maxLength": 3}, ["maxLength"]),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"]),
    "oneOf of objects": (
        {"oneOf": [{"type": "object", "properties": {"a": {"const": 1}}}, {"type": "object"}]},
        ["oneOf"],
    ),
    "oneOf with a constant that nobody requires": (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": value}, "o": {"type": "null"}}}
                for value in "ab"
            ]
        },
        ["oneOf"],
    ),
}


@pytest.mark.parametrize("name", UNENFORCED)
def test_limit_that_no_grammar_holds_is_told(library: Library, name: str) -> None:
    schema, keys = UNENFORCED[name]
    assert sorted(unenforced(library, schema)) == sorted(keys)


@pytest.mark.parametrize("name", UNENFORCED)
def test_strict_function_refuses_such_a_limit(library: Library, name: str) -> None:
    schema, keys = UNENFORCED[name]
    with pytest.raises(NativeError) as caught:
        apply(library, template_text(QWEN3), tools=[tool(field(schema), strict=True)])
    assert caught.value.status == Status.GRAMMAR
    place = "tools[0].function.parameters at #/properties/x"
    assert any(
        caught.value.message.startswith(f"{place}: {key} cannot be enforced, but the schema is strict")
        for key in keys
    )
    chat = json.loads(apply(library, template_text(QWEN3), tools=[tool(field(schema))]))
    assert sorted(chat["unenforced"]) == sorted(f"{place}: {key}" for key in keys)


def test_format_is_an_annotation_of_a_strict_function(library: Library) -> None:
    parameters = field({"type": "string", "format": "email"})
    chat = json.loads(apply(library, template_text(QWEN3), tools=[tool(parameters, strict=True)]))
    assert chat["unenforced"] == ["tools[0].function.parameters at #/properties/x: format"]


def test_limit_behind_many_formats_is_told(library: Library) -> None:
    properties: Schema = {f"p{i}": {"type": "string", "format": "email"} for i in range(150)}
    properties["last"] = {"type": "number", "multipleOf": 2}
    chat = json.loads(
        chat_of(library, {"type": "object", "properties": properties, "required": list(properties)})
    )
    assert chat["unenforced"][-1] == "json_schema at #/properties/last: multipleOf"


DECISIVE: dict[str, tuple[Schema, str]] = {
    "not": ({"not": {}}, "not cannot"),
    "then": ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if cannot"),
    "patternProperties": ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties cannot"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames cannot"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains cannot"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired cannot"),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"not": {}}}},
        "dependentSchemas cannot",
    ),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies cannot"),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems cannot"),
    "unevaluatedProperties": (
        {"type": "object", "additionalProperties": True, "unevaluatedProperties": False},
        "unevaluatedProperties beside additionalProperties",
    ),
    "$dynamicRef": ({"$dynamicRef": "#node"}, "$dynamicRef cannot"),
    "allOf of strings": ({"allOf": [{"minLength": 2}, {"maxLength": 3}]}, "allOf cannot be written"),
    "allOf with one property twice": (
        {"allOf": [{"properties": {"a": {"minimum": 1}}}, {"properties": {"a": {"type": "integer"}}}]},
        "allOf cannot be written",
    ),
    "allOf of closed objects": (
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]},
        "allOf cannot be written",
    ),
    "allOf with a count of properties": (
        {"allOf": [{"properties": {"a": {}}, "maxProperties": 1}, {"properties": {"b": {}}}]},
        "allOf cannot be written",
    ),
    "allOf of objects that are no objects": (
        {"type": "string", "allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        "allOf cannot be written",
    ),
    "type beside a reference to another": (
        {"type": "string", "anyOf": [{"$ref": "#/$defs/a"}, {"const": "b"}]},
        "type beside anyOf must be that of each alternative",
    ),
    "required that is no list": ({"type": "object", "required": True}, "required must be a list of names"),
    "items beside prefixItems": (
        {"type": "array", "prefixItems": [{}], "items": {"type": "string"}},
        "items beside prefixItems",
    ),
    "more items than a tuple has": (
        {"type": "array", "prefixItems": [{}], "minItems": 2},
        "minItems does not fit",
    ),
    "fewer items than a tuple has": (
        {"type": "array", "prefixItems": [{}, {}], "maxItems": 1},
        "maxItems does not fit",
    ),
    "others beside a name that grammars cannot exclude": (
        {"type": "object", "properties": {"a]": {"type": "null"}}, "additionalProperties": True},
        "additionalProperties cannot be written as a grammar beside a name",
    ),
    "pattern that counts far": (
        {"type": "string", "pattern": "^a{1,5000}$"},
        "pattern ^a{1,5000}$ is not supported",
    ),
    "class of nothing but quotes": ({"type": "string", "pattern": '^["]$'}, "pattern"),
}


@pytest.mark.parametrize("name", DECISIVE)
def test_keyword_that_decides_is_refused_or_left_out(library: Library, name: str) -> None:
    schema, message = DECISIVE[name]
    definitions = {"$defs": DEFINITIONS}
    assert f"json_schema at #/properties/x: {message}" in refusal_of(library, field(schema) | definitions)
    chat = json.loads(apply(library, template_text(QWEN3), tools=[tool(field(schema) | definitions)]))
    place = f"tools[0].function.parameters at #/properties/x: {message.split()[0]}"
    assert chat["unenforced"][0] == place


MALFORMED: dict[str, tuple[Schema, str]] = {
    "additionalProperties": ({"type": "object", "additionalProperties": 5}, "additionalProperties must be"),
    "prefixItems": ({"type": "array", "prefixItems": {}}, "prefixItems must be a list of schemas"),
    "enum": ({"enum": "a"}, "enum must be a list"),
    "bound": ({"type": "integer", "minimum": "5"}, "minimum must be a number"),
    "type": ({"type": 5}, "type 5 is unknown"),
    "format": ({"type": "string", "format": 5}, "format must be a string"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_keyword_of_the_wrong_kind_is_refused_by_its_place(library: Library, name: str) -> None:
    schema, message = MALFORMED[name]
    assert f"json_schema at #/properties/x: {message}" in refusal_of(library, field(schema))
