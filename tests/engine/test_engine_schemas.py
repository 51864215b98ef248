"""Recursive schemas in the engine process: answers that end are valid, with speculation and without."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from engine_rig import Chat, EngineProcess

from s2moe.engine import messages as wire

QUESTION = ("user", "Draw the river and what lies at it as a tree.")
OFF = wire.Speculation(method="off")
FORCED = wire.Speculation(exact=True, adaptive=False)
"""Drafts in every step, whether they pay or not."""

ROOT = {
    "type": "object",
    "properties": {
        "name": {"enum": ["river", "stone", "boat"]},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["name", "children"],
    "additionalProperties": False,
}
"""The root is its own child."""
LIST = {
    "type": "object",
    "properties": {"first": {"$ref": "#/$defs/river~1stone"}},
    "required": ["first"],
    "additionalProperties": False,
    "$defs": {
        "river/stone": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {
                        "length": {"type": "integer", "minimum": 1900, "maximum": 10**17},
                        "next": {"$ref": "#/$defs/river~1stone"},
                    },
                    "required": ["length", "next"],
                    "additionalProperties": False,
                },
            ]
        }
    },
}


@pytest.fixture(scope="module")
def chat(demo_model_path: Path) -> Iterator[Chat]:
    engine = EngineProcess()
    # one thread: two are slow where other processes want the processors
    ready = engine.load(demo_model_path, n_ctx=1024, n_batch=256, n_threads=1, speculation=wire.Speculation())
    assert isinstance(ready, wire.Ready), ready
    yield Chat(engine)
    engine.close()


def liking(chat: Chat, texts: Sequence[str]) -> dict[int, float]:
    """A logit bias for what these texts begin with: left alone, the model nests without end."""
    tokens = {}
    for text in texts:
        chat.engine.send(wire.Tokenize(query_id="t", text=text))
        tokenized = chat.engine.receive_until(wire.Tokenized)[-1]
        assert isinstance(tokenized, wire.Tokenized)
        tokens[tokenized.tokens[0]] = 1.7
    return tokens


def answers(
    chat: Chat, schema: dict[str, Any], ends: Sequence[str], speculation: wire.Speculation
) -> Iterator[Any]:
    """Those that end by themselves. ends: what the model does not like as much as it should."""
    bias = liking(chat, ends)
    for seed in range(4):
        content, finished = chat.ask(
            QUESTION,
            chat_options_json=json.dumps({"json_schema": schema, "strict_schema": True}).encode(),
            sampling=wire.Sampling(temperature=1.0, seed=seed, logit_bias=bias),
            speculation=speculation,
            max_tokens=120,
        )
        if finished.reason == "stop":
            yield json.loads(content)


@pytest.mark.parametrize("speculation", [OFF, FORCED], ids=["plain", "drafted"])
@pytest.mark.parametrize(
    ("schema", "inner", "ends"),
    [(ROOT, "children", ["]", "[]", " []"]), (LIST, "first", ["null", " null"])],
    ids=["root", "list"],
)
def test_answer_to_a_recursive_schema_is_valid(
    chat: Chat, schema: dict[str, Any], inner: str, ends: Sequence[str], speculation: wire.Speculation
) -> None:
    found = list(answers(chat, schema, ends, speculation))
    assert any(value[inner] for value in found), "none of the answers is nested"
    for value in found:
        jsonschema_rs.validate(schema, value)


def test_recursion_that_consumes_nothing_is_refused_by_its_place(chat: Chat) -> None:
    schema = {"anyOf": [{"type": "string"}, {"$ref": "#"}]}
    failed = chat.fail(QUESTION, chat_options_json=json.dumps({"json_schema": schema}).encode())
    assert (failed.code, failed.param) == ("invalid_schema", "response_format")
    assert "json_schema at #/anyOf/1: $ref # leads back to itself" in failed.message
