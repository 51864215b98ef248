"""Real clients on the real server with a scripted engine: what each one sees is what the engine said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scenario
from fake_engine import FakeEngine
from install import requirements
from threaded_rig import threaded_server

from clients import CLIENTS, Client

KEY = "right-key"
DOCUMENT = Path(__file__).parents[2] / "docs" / "clients.md"
USAGE = {
    "prompt": scenario.N_PROMPT_TOKENS,
    "completion": scenario.N_COMPLETION_TOKENS,
    "cached": scenario.N_CACHED_TOKENS,
}
GREETED = {"text": scenario.GREETING, "finish": "stop", "usage": USAGE}
THOUGHT = {"text": scenario.CONCLUSION, "reasoning": scenario.THOUGHT}
ONE_CALL = {"calls": [scenario.PARIS], "finish": "tool_calls"}
TWO_CALLS = {"calls": [scenario.PARIS, scenario.ROME], "finish": "tool_calls"}
WEATHER = {"text": scenario.WEATHER}
PERSON = {"value": scenario.PERSON}
# what everyone is asked; a client may leave a case out only with a reason
CASES: dict[str, dict[str, Any]] = {
    "chat": GREETED,
    "stream": GREETED,
    "reasoning": THOUGHT,
    "reasoning_stream": THOUGHT,
    "one_call": ONE_CALL,
    "one_call_stream": ONE_CALL,
    "two_calls": TWO_CALLS,
    "two_calls_stream": TWO_CALLS,
    "tool_result": WEATHER,
    "schema": PERSON,
    "schema_stream": PERSON,
    "too_long": {"status": 400, "code": "context_length_exceeded"},
    "wrong_key": {"status": 401, "code": "invalid_api_key"},
    "busy": {"status": 429, "code": "queue_full"},
    "busy_once": {"text": scenario.GREETING},
}
# what only some programs try
MORE_CASES: dict[str, dict[str, Any]] = {
    "helper": GREETED,
    "models": {"models": ["demo"]},
    "responses": {"text": scenario.GREETING, "usage": USAGE},
    "responses_stream": {"text": scenario.GREETING},
    "schema_by_tool": PERSON,
    "schema_by_tool_stream": PERSON,
    "count_tokens": {"counted": True},
    "tool_result_stream": WEATHER,
    "too_long_stream": {"status": 400, "code": "context_length_exceeded"},
}
ERROR_TEXTS = {
    "too_long": f"maximum context length is {scenario.N_CTX} tokens",
    "too_long_stream": f"maximum context length is {scenario.N_CTX} tokens",
    "wrong_key": "API key",
    "busy": "queue of 16 waiting requests is full",
}
ERROR_KINDS = {
    "openai (Python)": {"too_long": "BadRequestError", "busy": "RateLimitError"},
    "openai (Node)": {"too_long": "BadRequestError", "busy": "RateLimitError"},
    "litellm": {"too_long": "ContextWindowExceededError", "busy": "RateLimitError"},
    "anthropic (Python)": {"too_long": "BadRequestError", "busy": "RateLimitError"},
}


@pytest.fixture(scope="module", params=CLIENTS, ids=lambda client: client.name)
def reported(request: pytest.FixtureRequest) -> Iterator[tuple[Client, dict[str, Any]]]:
    """A client, and the report of its program."""
    client: Client = request.param
    with threaded_server(FakeEngine(scenario.BusyOnce()), api_key=KEY) as rig:
        yield client, client.run(rig.url, KEY, scenario.CASES_PATH)


@pytest.mark.parametrize("case", [*CASES, *MORE_CASES])
def test_client_sees_what_the_engine_said(reported: tuple[Client, dict[str, Any]], case: str) -> None:
    client, report = reported
    if case not in report["seen"]:
        if case in MORE_CASES:
            pytest.skip("not tried by this program")
        assert case in client.unsupported, "the program leaves out a case without a reason"
        pytest.skip(client.unsupported[case])
    seen = report["seen"][case]
    assert seen is not None, "the request that should fail was answered"
    assert "failed" not in seen, seen["failed"]
    check(client, case, seen, {**CASES, **MORE_CASES}[case])


def check(client: Client, case: str, seen: dict[str, Any], expected: dict[str, Any]) -> None:
    """What the client has no member for is not compared; that is little, and docs/clients.md says it."""
    for key in ("text", "value", "models", "reasoning", "counted", "status", "code"):
        if key in expected and (key in seen or key not in ("status", "code")):
            assert seen[key] == expected[key], key
    if "calls" in expected:
        calls = [(call["name"], call["arguments"]) for call in seen["calls"]]
        assert calls == expected["calls"]
        ids = [call["id"] for call in seen["calls"] if "id" in call]
        assert all(ids)
        assert len(set(ids)) == len(ids)
    if "finish" in seen:
        assert seen["finish"] == client.finish.get(expected["finish"], expected["finish"])
    if "usage" in seen:
        assert seen["usage"] == {key: USAGE[key] for key in seen["usage"]}
    if "id" in seen:
        assert seen["id"].startswith("chatcmpl-")
    if case in ERROR_TEXTS:
        assert ERROR_TEXTS[case] in seen["text"]
        kinds = ERROR_KINDS.get(client.name, {})
        assert seen.get("kind") == kinds.get(case, seen.get("kind"))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_document_names_the_client_and_what_it_cannot_do(client: Client) -> None:
    text = DOCUMENT.read_text()
    assert f"| {client.name} |" in text
    for reason in client.unsupported.values():
        assert reason in text


def test_document_has_the_versions_that_are_tested() -> None:
    text = DOCUMENT.read_text()
    for wanted in requirements().values():
        pins = (
            wanted if isinstance(wanted, list) else [f"{name} {version}" for name, version in wanted.items()]
        )
        for pin in pins:
            assert pin.replace("==", " ") in text, pin
