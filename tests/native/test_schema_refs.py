"""References in JSON schemas: recursion, spellings, and definitions that want the same name."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from s2moe.engine.native import Library

from chat_rig import GrammarOracle, apply, template_text
from llama_model import LlamaModel
from schema_rig import Schema, chat_of, field, refusal_of, tool

QWEN3 = "Qwen-Qwen3-0.6B"


def closed(properties: Schema, **more: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


LIST = {
    "anyOf": [
        {"type": "null"},
        {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False},
    ]
}
UI = closed(
    {
        "type": {"enum": ["div", "button"]},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "attributes": {"type": "array", "items": {"$ref": "#/$defs/attribute"}},
    },
    **{"$defs": {"attribute": closed({"name": {"const": "id"}, "value": {"type": "string"}})}},
)
"""A tree whose nodes are the whole schema, as OpenAI's guide to structured outputs has it."""
LEAF = '{"type": "div", "children": [], "attributes": []}'

RECURSIVE: dict[str, tuple[Schema, list[str], list[str]]] = {
    "list through anyOf": (
        field({"$ref": "#/$defs/node"}) | {"$defs": {"node": LIST}},
        ['{"x": null}', '{"x": {"next": {"next": null}}}', '{"x": {"next": {}}}'],
        ['{"x": {"next": 1}}', '{"x": {"next": {"last": null}}}'],
    ),
    "the root is the list": (
        {"$ref": "#/$defs/node", "$defs": {"node": LIST}},
        ["null", '{"next": {"next": null}}'],
        ['{"next": 1}', "{"],
    ),
    "oneOf with a discriminator": (
        {
            "$defs": {
                "tree": {
                    "oneOf": [
                        closed({"kind": {"const": "leaf"}, "value": {"type": "boolean"}}),
                        closed(
                            {
                                "kind": {"const": "fork"},
                                "left": {"$ref": "#/$defs/tree"},
                                "right": {"$ref": "#/$defs/tree"},
                            }
                        ),
                    ]
                }
            },
            "$ref": "#/$defs/tree",
        },
        [
            '{"kind": "leaf", "value": true}',
            '{"kind": "fork", "left": {"kind": "leaf", "value": true},'
            ' "right": {"kind": "leaf", "value": false}}',
        ],
        [
            '{"kind": "fork", "left": {"kind": "leaf"}, "right": {"kind": "leaf"}}',
            '{"kind": "leaf", "left": 1}',
        ],
    ),
    "each through the other": (
        field({"$ref": "#/$defs/a"})
        | {
            "$defs": {
                "a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
                "b": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a"}]},
            }
        },
        ['{"x": [1, [2, []]]}', '{"x": []}'],
        ['{"x": 1}', '{"x": [true]}'],
    ),
    "through properties of an allOf": (
        field({"$ref": "#/$defs/node"})
        | {
            "$defs": {
                "named": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
                "node": {
                    "allOf": [
                        {"$ref": "#/$defs/named"},
                        {
                            "type": "object",
                            "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                            "required": ["kids"],
                        },
                    ]
                },
            }
        },
        ['{"x": {"name": "a", "kids": [{"name": "b", "kids": []}]}}'],
        ['{"x": {"name": "a", "kids": [{"name": "b"}]}}', '{"x": {"kids": []}}'],
    ),
    "through one part of an allOf": (
        field({"$ref": "#/$defs/node"})
        | {
            "$defs": {
                "node": closed({"next": {"anyOf": [{"allOf": [{"$ref": "#/$defs/node"}]}, {"type": "null"}]}})
            }
        },
        ['{"x": {"next": {"next": null}}}'],
        ['{"x": {"next": 1}}'],
    ),
    "the root itself": (
        UI,
        [LEAF, LEAF.replace("[]", f"[{LEAF}, {LEAF}]", 1)],
        [LEAF.replace("div", "span"), LEAF.replace("[]", '[{"type": "div"}]', 1), LEAF.replace("[]", "[1]")],
    ),
    "the root itself, of draft 4": (
        {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#"}, {"$ref": "#/definitions/end"}]}},
            "required": ["next"],
            "additionalProperties": False,
            "definitions": {"end": {"type": "null"}},
        },
        ['{"next": {"next": null}}'],
        ['{"next": 1}', "{}"],
    ),
    "the root by its name": (
        {"$id": "https://example.com/node"}
        | closed({"next": {"anyOf": [{"$ref": "https://example.com/node"}, {"type": "null"}]}}),
        ['{"next": {"next": null}}'],
        ['{"next": 1}', "{}"],
    ),
}


@pytest.mark.parametrize("name", RECURSIVE)
def test_recursive_schema_becomes_a_recursive_grammar(library: Library, model: LlamaModel, name: str) -> None:
    schema, valid, invalid = RECURSIVE[name]
    chat = chat_of(library, schema)
    assert json.loads(chat)["unenforced"] == []
    oracle = GrammarOracle.of_chat(model, chat)
    for text in valid:
        assert jsonschema_rs.is_valid(schema, json.loads(text)), text
        assert oracle.allows(text), text
    for text in invalid:
        assert not oracle.allows(text), text


SPELLINGS: dict[str, tuple[Schema, str]] = {
    "escaped slash": ({"$defs": {"a/b": {"const": 5}}}, "#/$defs/a~1b"),
    "escaped tilde": ({"$defs": {"a~b": {"const": 5}}}, "#/$defs/a~0b"),
    "tilde and a digit": ({"$defs": {"~1": {"const": 5}, "/": {}}}, "#/$defs/~01"),
    "percent": ({"$defs": {"a b": {"const": 5}}}, "#/$defs/a%20b"),
    "percent of the dollar": ({"$defs": {"a": {"const": 5}}}, "#/%24defs/a"),
    "percent of a slash in a name": ({"$defs": {"a/b": {"const": 5}}}, "#/$defs/a%7E1b"),
    "percent that is none": ({"$defs": {"100%": {"const": 5}}}, "#/$defs/100%"),
    "letters beyond ASCII": ({"$defs": {"größe": {"const": 5}}}, "#/$defs/gr%C3%B6%C3%9Fe"),
    "type parameters": ({"$defs": {"List[int]": {"const": 5}}}, "#/$defs/List%5Bint%5D"),
    "definitions": ({"definitions": {"a": {"const": 5}}}, "#/definitions/a"),
    "nested definitions": ({"$defs": {"a": {"$defs": {"b": {"const": 5}}}}}, "#/$defs/a/$defs/b"),
    "property": ({"$defs": {"a": {"properties": {"b": {"const": 5}}}}}, "#/$defs/a/properties/b"),
    "list": ({"$defs": {"a": {"anyOf": [{"const": 4}, {"const": 5}]}}}, "#/$defs/a/anyOf/1"),
    "items": ({"$defs": {"a": {"items": {"const": 5}}}}, "#/$defs/a/items"),
    "components of OpenAPI": ({"components": {"schemas": {"a": {"const": 5}}}}, "#/components/schemas/a"),
    "long name": ({"$defs": {"a" * 1000: {"const": 5}}}, "#/$defs/" + "a" * 1000),
    "empty name": ({"$defs": {"": {"const": 5}}}, "#/$defs/"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_reference_is_followed_however_it_is_spelled(library: Library, model: LlamaModel, name: str) -> None:
    definitions, ref = SPELLINGS[name]
    oracle = GrammarOracle.of_chat(model, chat_of(library, field({"$ref": ref}) | definitions))
    assert oracle.allows('{"x": 5}')
    assert not oracle.allows('{"x": 4}')


def recursion_of(schema: Any) -> Schema:
    return field({"$ref": "#/$defs/a"}) | {"$defs": {"a": schema}}


REFUSED: dict[str, tuple[Schema, str]] = {
    "anyOf with itself": (
        recursion_of({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}),
        "#/$defs/a/anyOf/1: $ref #/$defs/a leads back to itself with no object or array in between",
    ),
    "allOf with itself": (
        recursion_of({"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {}}}]}),
        "#/$defs/a/allOf/0: $ref #/$defs/a leads back to itself with no object or array in between",
    ),
    "on a detour": (
        recursion_of({"oneOf": [{"type": "string"}, {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}]}),
        "#/$defs/a/oneOf/1/anyOf/1: $ref #/$defs/a leads back",
    ),
    "the root with itself": (
        {"anyOf": [{"type": "string"}, {"$ref": "#"}]},
        "#/anyOf/1: $ref # leads back to itself with no object or array in between",
    ),
    "nothing but the root": ({"$ref": "#"}, "#: $ref leads back to itself"),
    "inside a copy of the root": (
        closed({"next": {"anyOf": [{"$ref": "#"}, {"type": "strin"}]}}),
        "#/properties/next/anyOf/1: type",
    ),
    "inside a name with a slash": (
        field({"$ref": "#/$defs/a~1b"}) | {"$defs": {"a/b": field({"not": {}})}},
        "#/$defs/a~1b/properties/x: not",
    ),
    "broken escape": (field({"$ref": "#/$defs/a~2"}), "#/properties/x: $ref #/$defs/a~2 is not supported"),
    "anchor": (field({"$ref": "#a"}) | {"$defs": {"a": {"$anchor": "a"}}}, "#/properties/x: $ref #a is not"),
    "other document": (field({"$ref": "b.json#/a"}), "#/properties/x: $ref b.json#/a is not supported"),
    "list without this place": (
        field({"$ref": "#/$defs/a/anyOf/2"}) | {"$defs": {"a": {"anyOf": [{}, {}]}}},
        "leads nowhere",
    ),
    "text": (field({"$ref": "#/title"}) | {"title": "a"}, "$ref #/title leads to what is no schema"),
    "below another $id": (
        field({"$id": "https://example.com/x"} | field({"$ref": "#/$defs/a"})) | {"$defs": {"a": {}}},
        "#/properties/x/properties/x: $ref below a schema with an $id",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reference_is_refused_by_its_place(library: Library, name: str) -> None:
    schema, message = REFUSED[name]
    assert message in refusal_of(library, schema)


def test_copies_are_bounded(library: Library) -> None:
    """Each level of a deep schema refers to another one: all of them together would be large."""
    schema: Schema = {"enum": ["x" * 50_000]}
    for _ in range(30):
        schema = {"type": "object", "properties": {"a": schema}}
    places = ["#" + "/properties/a" * k for k in range(1, 30)]
    schema["properties"] |= {f"r{i}": {"$ref": place} for i, place in enumerate(places)}
    assert "too large a part" in refusal_of(library, schema)


# ── names ───────────────────────────────────────────────────────────────────────────────────────


def test_definition_is_not_taken_for_a_property_of_the_same_name(library: Library, model: LlamaModel) -> None:
    schema = closed(
        {"user": {"$ref": "#/$defs/user"}, "ref": closed({"defs": closed({"user": {"const": 3}})})},
        **{
            "$defs": {
                "user": closed(
                    {"address": closed({"city": {"const": "Rome"}}), "of": {"$ref": "#/$defs/user_address"}}
                ),
                "user_address": {"const": 7},
            }
        },
    )
    oracle = GrammarOracle.of_chat(model, chat_of(library, schema))
    end = ', "ref": {"defs": {"user": 3}}}'
    assert oracle.allows('{"user": {"address": {"city": "Rome"}, "of": 7}' + end)
    assert not oracle.allows('{"user": {"address": {"city": "Rome"}, "of": {"city": "Rome"}}' + end)


@pytest.mark.parametrize("names", [("a_b", "a-b"), ("größe", "gräße"), ("x[int]", "x(int)")])
def test_definitions_with_similar_names_stay_apart(
    library: Library, model: LlamaModel, names: tuple[str, str]
) -> None:
    properties = {f"p{i}": {"$ref": f"#/$defs/{name}"} for i, name in enumerate(names)}
    schema = closed(properties, **{"$defs": {name: {"const": i} for i, name in enumerate(names)}})
    oracle = GrammarOracle.of_chat(model, chat_of(library, schema))
    assert oracle.allows('{"p0": 0, "p1": 1}')
    assert not oracle.allows('{"p0": 0, "p1": 0}')


def test_tools_keep_their_own_definitions(library: Library, model: LlamaModel) -> None:
    tools = [
        tool(closed({"item": {"$ref": "#/$defs/Item"}}, **{"$defs": {"Item": {"const": value}}}), name)
        for name, value in (("buy", "bread"), ("sell", "stone"))
    ]
    chat = apply(library, template_text(QWEN3), tools=tools, tool_choice="required", enable_thinking=False)
    oracle = GrammarOracle.of_chat(model, chat)

    def call(name: str, item: str) -> str:
        arguments = json.dumps({"item": item})
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    assert oracle.allows(call("buy", "bread"))
    assert oracle.allows(call("sell", "stone"))
    assert not oracle.allows(call("sell", "bread"))
    assert not oracle.allows(call("buy", "stone"))


def test_recursive_tool_is_called(library: Library, model: LlamaModel) -> None:
    chat = apply(
        library,
        template_text(QWEN3),
        tools=[tool(UI, "draw", strict=True)],
        tool_choice="required",
        enable_thinking=False,
    )
    oracle = GrammarOracle.of_chat(model, chat)
    call = '<tool_call>\n{"name": "draw", "arguments": %s}\n</tool_call>'
    assert oracle.allows(call % LEAF.replace("[]", f"[{LEAF}]", 1))
    assert not oracle.allows(call % LEAF.replace("[]", "[1]", 1))
