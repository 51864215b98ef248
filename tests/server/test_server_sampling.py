"""Bounds of the sampling fields, which are the same in all endpoints that generate."""

from __future__ import annotations

from typing import Any

import pytest
from server_rig import ServerRig
from test_server_errors import assert_error

USER = [{"role": "user", "content": "hi"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
}
LIMITS = (
    ("/v1/chat/completions", "max_tokens"),
    ("/v1/chat/completions", "max_completion_tokens"),
    ("/v1/completions", "max_tokens"),
    ("/v1/responses", "max_output_tokens"),
    ("/v1/messages", "max_tokens"),
)
NO_LIMIT = 2**31 - 1


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("top_p", 0, 0),
        ("top_p", 0.0, 0),
        ("top_p", 1, 1),
        ("temperature", 0, 0),
        ("temperature", 2, 2),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("min_p", 0, 0),
        ("min_p", 1, 1),
        ("presence_penalty", -2, -2),
        ("frequency_penalty", 2, 2),
        ("seed", -1, None),
        ("seed", -2, 2**32 - 2),
        ("seed", 2**70 + 3, 3),
    ],
)
async def test_value_at_the_bound_reaches_the_engine(
    rig: ServerRig, path: str, field: str, value: float, expected: float | None
) -> None:
    reply = await rig.http.post(path, json={**ENDPOINTS[path], field: value})
    assert reply.status_code == 200, reply.text
    assert getattr(rig.engine.requests[0].sampling, field) == expected


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("temperature", -1),
        ("temperature", 2.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("seed", 0.5),
    ],
)
async def test_value_beyond_the_bound_is_named(rig: ServerRig, path: str, field: str, value: float) -> None:
    reply = await rig.http.post(path, json={**ENDPOINTS[path], field: value})
    assert reply.status_code == 400
    assert f"`{field}`" in reply.json()["error"]["message"]
    assert rig.engine.requests == []


@pytest.mark.parametrize(("path", "field"), LIMITS)
async def test_limit_of_minus_one_is_none(rig: ServerRig, path: str, field: str) -> None:
    for value in (-1, 10**30):
        reply = await rig.http.post(path, json={**ENDPOINTS[path], field: value})
        assert reply.status_code == 200, reply.text
    assert [request.max_tokens for request in rig.engine.requests] == [NO_LIMIT] * 2


@pytest.mark.parametrize(("path", "field"), LIMITS)
@pytest.mark.parametrize("value", [0, -2, -1.0, True, "5"])
async def test_other_limit_below_one_is_named(rig: ServerRig, path: str, field: str, value: object) -> None:
    reply = await rig.http.post(path, json={**ENDPOINTS[path], field: value})
    assert reply.status_code == 400
    assert f"`{field}`" in reply.json()["error"]["message"]
    assert rig.engine.requests == []


async def test_limit_of_the_newer_name_wins_also_where_it_is_none(rig: ServerRig) -> None:
    body = {"messages": USER, "max_tokens": 3, "max_completion_tokens": -1}
    assert (await rig.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert rig.engine.requests[0].max_tokens == NO_LIMIT


async def test_document_says_what_is_accepted(rig: ServerRig) -> None:
    schemas = (await rig.http.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest"):
        limits = schemas[name]["properties"]["max_tokens"]["anyOf"]
        assert {"type": "integer", "minimum": 1} in limits
        assert {"type": "integer", "const": -1} in limits
        assert {"type": "null"} in limits
    bounds, _ = schemas["CompletionRequest"]["properties"]["top_p"]["anyOf"]
    assert (bounds["minimum"], bounds["maximum"]) == (0, 1)


async def test_limit_of_messages_is_still_needed(rig: ServerRig) -> None:
    reply = await rig.http.post("/v1/messages", json={"messages": USER})
    assert reply.status_code == 400
    assert "`max_tokens` is required" in reply.json()["error"]["message"]
    assert_error(
        await rig.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 0}),
        400,
        "invalid_request_error",
        "invalid_value",
        "max_output_tokens",
    )
