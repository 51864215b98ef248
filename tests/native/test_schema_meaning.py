"""Whatever a schema says: what its grammar lets through is valid, unless its loss is told."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from s2moe.engine.native import Library, NativeError, Status

from chat_rig import parse
from llama_model import LlamaModel
from schema_rig import GrammarWriter, Schema, chat_of

NAMES = st.sampled_from(["a", "b", "ab", "a-b", "kind", "ref", "defs", "é"])
VALUES = st.sampled_from([None, True, 0, 1, 7, 1.5, "a", "b", "", [], [1], {}, {"a": 1}])
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])
REFS = st.builds(
    lambda ref: {"$ref": ref},
    st.sampled_from(["#", "#/$defs/a", "#/$defs/a-b", "#/$defs/a~1b", "#/%24defs/a_b", "#/properties/a"]),
)
BOUNDS = st.integers(-12, 12) | st.sampled_from([100, 1900, -205, 2**53, 2**63, -(10**30), 2.5])
COUNTS = st.integers(0, 3)


@st.composite
def objects(draw: st.DrawFn, part: st.SearchStrategy[Any]) -> Schema:
    properties = draw(st.dictionaries(NAMES, part, max_size=3))
    others = {
        "type": st.just("object"),
        "required": st.sets(st.sampled_from(list(properties) or ["a"])).map(list),
        "minProperties": COUNTS,
        "maxProperties": COUNTS,
    }
    rest = st.sampled_from(["additionalProperties", "unevaluatedProperties"])
    schema = {"properties": properties} | draw(st.fixed_dictionaries({}, optional=others))
    return schema | draw(st.dictionaries(rest, part | st.booleans(), max_size=1))


def extended(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    parts = st.lists(part, min_size=1, max_size=3)
    return st.one_of(
        objects(part),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": part},
            optional={"minItems": COUNTS, "maxItems": COUNTS, "uniqueItems": st.booleans()},
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "prefixItems": parts}, optional={"minItems": COUNTS}
        ),
        st.fixed_dictionaries({"anyOf": parts}),
        st.fixed_dictionaries({"oneOf": parts}),
        st.fixed_dictionaries({"oneOf": st.lists(objects(part), min_size=2, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(objects(part), min_size=1, max_size=2)}),
        st.fixed_dictionaries({"anyOf": parts, "type": TYPES}),
        st.fixed_dictionaries({"allOf": parts}, optional={"type": TYPES}),
    )


LEAVES = st.one_of(
    REFS,
    st.fixed_dictionaries({"type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True)}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number", ["integer", "null"]])},
        optional={
            "minimum": BOUNDS,
            "maximum": BOUNDS,
            "exclusiveMinimum": BOUNDS,
            "exclusiveMaximum": BOUNDS,
            "multipleOf": st.integers(1, 3),
        },
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("string"),
            "minLength": COUNTS,
            "maxLength": COUNTS,
            "pattern": st.sampled_from(
                ["^[ -~]+$", "a|b", r"^\d{2}[^\s]?$", r"^[\w.]*@$", "^(a|bc)+$", "[^a-c]"]
            ),
        },
    ),
    st.fixed_dictionaries(
        {}, optional={"const": VALUES, "type": TYPES, "minimum": COUNTS, "minLength": COUNTS}
    ),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=4)}, optional={"type": TYPES}),
    st.fixed_dictionaries({}, optional={"required": st.lists(NAMES, max_size=1), "minItems": COUNTS}),
    st.just(True),
)
PARTS = st.recursive(LEAVES, extended, max_leaves=5)
SCHEMAS = st.builds(
    lambda root, first, definitions: (
        root | {"properties": {"a": first} | root["properties"], "$defs": definitions}
    ),
    objects(PARTS),
    PARTS,
    st.fixed_dictionaries(dict.fromkeys(("a", "a-b", "a_b", "a/b"), PARTS)),
)


def chat_or_refusal(library: Library, schema: Schema) -> bytes | NativeError:
    try:
        return chat_of(library, schema)
    except NativeError as error:
        return error


@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 32))
def test_grammar_lets_nothing_invalid_through(
    library: Library, model: LlamaModel, schema: Schema, seed: int
) -> None:
    chat = chat_or_refusal(library, schema)
    if isinstance(chat, NativeError):
        assert chat.status == Status.GRAMMAR
        assert chat.message.startswith("json_schema at #"), chat.message
        return
    unenforced = json.loads(chat)["unenforced"]
    note(f"unenforced: {unenforced}")
    writer = GrammarWriter(model, chat)
    choices = random.Random(seed)
    for _ in range(3):
        text = writer.write(choices)
        if text is None:
            continue
        note(f"text: {text!r}")
        value = json.loads(parse(library, chat, [text]).content)  # which may be fenced
        assert unenforced or jsonschema_rs.is_valid(schema, value)
