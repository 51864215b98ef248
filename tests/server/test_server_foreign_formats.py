"""Schemas and grammars under names that Responses and Messages do not have: never dropped in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_rig import ServerRig

from s2moe.server.schema.foreign_formats import ForeignFormats
from s2moe.server.schema.sampling import SamplingFields

DOCUMENT = Path(__file__).parents[2] / "docs" / "responses-and-messages.md"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/responses": ({"input": "hi"}, "text.format"),
    "/v1/responses/input_tokens": ({"input": "hi"}, "text.format"),
    "/v1/messages": (
        {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
        "output_config.format",
    ),
    "/v1/messages/count_tokens": (
        {"messages": [{"role": "user", "content": "hi"}]},
        "output_config.format",
    ),
}
"""A body, and the protocol's own field for the form of an answer."""
GIVEN: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "json_schema": SCHEMA,
    "structured_outputs": {"json": SCHEMA},
    "guided_json": SCHEMA,
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= 'a'",
    "regex": "a+",
    "ebnf": "root ::= 'a'",
}


async def send(rig: ServerRig, path: str, **fields: Any) -> httpx.Response:
    return await rig.http.post(path, json={**ROUTES[path][0], **fields})


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("path", ROUTES)
async def test_foreign_name_is_a_400_that_says_the_own_one(rig: ServerRig, path: str, name: str) -> None:
    reply = await send(rig, path, **{name: GIVEN[name]})
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert f"`{name}`" in message
    assert f"`{ROUTES[path][1]}`" in message
    assert (rig.engine.requests, rig.engine.queries) == ([], [])


@pytest.mark.parametrize("path", ROUTES)
async def test_values_that_ask_for_nothing_pass(rig: ServerRig, path: str) -> None:
    empty = dict.fromkeys(GIVEN) | {"response_format": {"type": "text"}, "guided_json": {}, "regex": ""}
    assert (await send(rig, path, **empty)).status_code == 200


def test_every_foreign_name_is_tested() -> None:
    assert set(GIVEN) == set(ForeignFormats.model_fields)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_two_formats_are_a_400_that_names_both(rig: ServerRig, path: str) -> None:
    reply = await send(rig, path, output_config={"format": FORMAT}, output_format=FORMAT)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "`output_format`" in message
    assert "`output_config.format`" in message
    for one in (
        {"output_config": {"format": FORMAT}, "output_format": None},
        {"output_config": {"effort": "low"}, "output_format": FORMAT},
    ):
        assert (await send(rig, path, **one)).status_code == 200


def test_the_document_lists_exactly_the_fields_of_chat_that_work() -> None:
    (sentence,) = re.findall(
        r"Of chat completions' fields .*? work here too", DOCUMENT.read_text(), re.DOTALL
    )
    assert set(re.findall(r"`(\w+)`", sentence)) == set(SamplingFields.model_fields)
