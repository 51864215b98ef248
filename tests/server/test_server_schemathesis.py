"""Schemathesis on our OpenAPI document: every operation, good and bad input, each answer as documented.

It runs as the command that anybody may run against a server of their own, with a fixed seed. What it checks:
no 5xx, no status, content type, header or body beyond the document, and 405 for other methods. Not checked is
whether input that breaks the document is refused, since fields that the server does not know are ignored on
purpose, nor whether input that keeps it is accepted, since JSON Schema cannot say all that a request must be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from fake_engine import Action, FakeEngine, Generate
from prometheus_client.parser import text_string_to_metric_families
from scripted_answers import answer, answer_with_calls, answer_with_logprobs
from server_rig import ServerRig
from threaded_rig import threaded_server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
COMMAND = Path(sys.executable).with_name("schemathesis")
# operations with the body of another one, which are fuzzed but not gone through value by value
SAME_BODIES = (
    "/apply-template",
    "/v1/chat/completions/input_tokens",
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
)
LIMIT_SECONDS = 280
"""On a machine with other work; alone each run takes a tenth of it."""


def varied(request: Generate) -> Sequence[Action]:
    """Answers with all that an answer may hold, in turn by what was asked."""
    if request.n_top_logprobs is not None:
        return answer_with_logprobs(request, ("a", -0.5), ("b", -9999.0))
    if b'"tools"' in request.chat_options_json:
        return answer_with_calls(request, ("look", {"at": "it"}), before="Wait.")
    return answer(request, "Hello", reasoning="why" if request.messages_json else "")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerRig]:
    with threaded_server(FakeEngine(varied)) as rig:
        yield rig


def run_schemathesis(
    server: ServerRig, folder: Path, *arguments: str, limit_seconds: float = LIMIT_SECONDS
) -> None:
    """Raises AssertionError with the report when a check failed."""
    command = [str(COMMAND), "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS)]
    command += ["--seed", "1", "--no-color", "--continue-on-failure", *arguments]
    environment = {**os.environ, "COLUMNS": "120"}
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]


def test_valid_values_of_every_field_are_answered_as_documented(server: ServerRig, tmp_path: Path) -> None:
    """Invalid ones, thousands, are left to `make test-clients`."""
    others = [argument for path in SAME_BODIES for argument in ("--exclude-path", path)]
    run_schemathesis(server, tmp_path, "--phases", "coverage", "--mode", "positive", *others)
    # so that a document whose examples never get through to the engine does not pass
    assert {"chat", "completions", "responses", "messages"} <= answered(server)


def test_random_input_is_answered_as_documented(server: ServerRig, tmp_path: Path) -> None:
    run_schemathesis(server, tmp_path, "--phases", "examples,fuzzing", "--max-examples", "10")


def answered(server: ServerRig) -> set[str]:
    """APIs with an answer, by the server's metrics."""
    metrics = httpx.get(f"{server.url}/metrics").text
    return {
        sample.labels["api"]
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "s2moe_requests_total" and sample.value > 0 and sample.labels["finish"] == "stop"
    }


def test_document_has_every_endpoint(server: ServerRig) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    operations = {f"{method} {path}" for path, item in document["paths"].items() for method in item}
    assert {
        "post /v1/chat/completions",
        "post /v1/completions",
        "post /v1/responses",
        "post /v1/messages",
        "post /v1/messages/count_tokens",
        "post /v1/embeddings",
        "post /tokenize",
        "post /detokenize",
        "post /apply-template",
        "get /v1/models",
        "get /health",
        "get /metrics",
        "get /props",
    } <= operations


def test_examples_of_the_document_are_answered(server: ServerRig) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    n_examples = 0
    for path, item in document["paths"].items():
        content = item.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for title, example in content.get("examples", {}).items():
            reply = httpx.post(server.url + path, json=example["value"])
            # the fake engine gives no embeddings
            expected = 400 if path == "/v1/embeddings" else 200
            assert reply.status_code == expected, (path, title, reply.text)
            n_examples += 1
    assert n_examples > 20
