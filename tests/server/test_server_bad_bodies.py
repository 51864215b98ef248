"""Bodies that no endpoint can read get an error of the shape of its API, from every endpoint."""

from __future__ import annotations

import json

import httpx
import pytest
from server_rig import ServerRig

BODIES = {
    "empty": b"",
    "blank": b" \n",
    "cut": b'{"model": "m", "messages": [',
    "not-json": b"messages=hi",
    "list": b"[]",
    "text": b'"hi"',
    "nan": b'{"temperature": NaN}',
    "infinity": b'{"temperature": 1e999}',
    "latin-1": b'{"input": "\xe4"}',
    "utf-16": "{}".encode("utf-16"),
    "lone-surrogate": b'{"input": "\\ud800"}',
    "two-objects": b'{"a": 1}{"b": 2}',
    "deep-list": b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep-object": b'{"input": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "long-number": b'{"max_tokens": ' + b"9" * 5000 + b"}",
}
# one wrong value for every name that any of the endpoints knows
WRONG_TYPES = json.dumps(
    {
        name: {"wrong": []}
        for name in (
            "messages",
            "prompt",
            "input",
            "content",
            "tokens",
            "model",
            "max_tokens",
            "stream",
            "tools",
        )
    }
).encode()
PATHS = (
    "/v1/chat/completions",
    "/v1/chat/completions/input_tokens",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/apply-template",
)


def assert_error(reply: httpx.Response, path: str) -> None:
    assert reply.status_code == 400, reply.text[:300]
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    error = body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
    else:
        assert set(body) == {"error"}
        assert isinstance(error["code"], str)
        assert "param" in error


@pytest.mark.parametrize("path", PATHS)
async def test_body_that_cannot_be_read_is_a_400(rig: ServerRig, path: str) -> None:
    for name, body in {**BODIES, "wrong-types": WRONG_TYPES}.items():
        reply = await rig.http.post(path, content=body, headers={"content-type": "application/json"})
        try:
            assert_error(reply, path)
        except AssertionError as error:
            raise AssertionError(f"{path}, {name}") from error
    assert rig.engine.requests == []
    assert (await rig.http.get("/health")).status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_body_beyond_the_limit_is_a_413(rig: ServerRig, path: str) -> None:
    body = b'{"model": "' + b"x" * (rig.settings.max_body_size + 1) + b'"}'
    reply = await rig.http.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 413
    assert reply.json()["error"]["message"]


async def test_every_endpoint_with_a_body_is_tried(rig: ServerRig) -> None:
    document = (await rig.http.get("/openapi.json")).json()
    assert {path for path, item in document["paths"].items() if "post" in item} == set(PATHS)
