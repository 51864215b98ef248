"""Whatever the engine releases, and however it cuts it: stream and whole answer of each API hold the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fake_engine import Action, FakeEngine, finished, started
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_answers import call_id
from server_rig import ServerRig, events_of
from threaded_rig import threaded_server

from s2moe.engine.messages import Generate, Step, ToolCallDelta

# markup that is ordinary text by now, and what JSON and SSE have to escape
FRAGMENTS = (
    "<think>",
    "</th",
    "<tool_call>",
    "{",
    '"',
    "\\",
    "\n\n",
    "data: ",
    "[DONE]",
    "é",
    "🙂",
    " ",
    "a",
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
arguments = st.dictionaries(st.sampled_from(("city", "größe", "<b>")), texts | st.integers(), max_size=3)


@dataclass
class Answer:
    """What an API made of an answer, in the words of the engine."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments as the model wrote them."""
    finish: str = ""
    tokens: int = 0


@st.composite
def answers(draw: st.DrawFn) -> tuple[Answer, list[Step]]:
    calls = draw(st.lists(st.tuples(st.sampled_from(("look", "write_file")), arguments), max_size=3))
    answer = Answer(
        content=draw(texts),
        reasoning=draw(texts),
        calls=[(name, json.dumps(values, ensure_ascii=False)) for name, values in calls],
    )
    answer.finish = "tool_calls" if calls else draw(st.sampled_from(("stop", "length")))
    # parts in the order in which a model writes them, cut anywhere, then packed into steps anyhow
    parts: list[dict[str, Any]] = [{"reasoning": piece} for piece in cut(draw, answer.reasoning)]
    parts += [{"content": piece} for piece in cut(draw, answer.content)]
    for index, (name, text) in enumerate(answer.calls):
        parts.append({"tool_calls": [ToolCallDelta(index=index, id=call_id(index), name=name)]})
        for piece in cut(draw, text):
            parts.append({"tool_calls": [ToolCallDelta(index=index, arguments=piece)]})
    steps: list[Step] = []
    while parts:
        step: dict[str, Any] = {"reasoning": "", "content": "", "tool_calls": []}
        for part in parts[: (n := draw(st.integers(1, 3)))]:
            for key, value in part.items():
                step[key] = step[key] + value
        del parts[:n]
        steps.append(Step(request_id="", **step))
    answer.tokens = len(steps)
    return answer, steps


def cut(draw: st.DrawFn, text: str) -> Iterator[str]:
    while text:
        n = draw(st.integers(1, max(1, len(text))))
        yield text[:n]
        text = text[n:]


# ── what a client makes of the answers of each API ──────────────────────────────────────────────


def of_chat(body: dict[str, Any]) -> Answer:
    (choice,) = body["choices"]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    return Answer(
        message["content"] or "",
        message.get("reasoning_content") or "",
        [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []],
        choice["finish_reason"],
        body["usage"]["completion_tokens"],
    )


def of_chat_stream(text: str) -> Answer:
    *data, done = events_of(text)
    assert done == "[DONE]"
    answer, names, pieces = Answer(), dict[int, str](), dict[int, str]()
    for chunk in map(json.loads, data):
        if not chunk["choices"]:
            answer.tokens = chunk["usage"]["completion_tokens"]
            continue
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        assert sum(bool(delta.get(key)) for key in ("content", "reasoning", "tool_calls")) <= 1
        answer.content += delta.get("content") or ""
        answer.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or []:
            index = call["index"]
            assert index == max(pieces, default=-1) or index == len(pieces)
            if index not in pieces:
                assert (call["id"], call["type"]) == (call_id(index), "function")
                names[index] = call["function"]["name"]
            else:
                assert not call.get("id")
                assert not call["function"].get("name")
            pieces[index] = pieces.get(index, "") + (call["function"].get("arguments") or "")
        if delta.get("content") or delta.get("reasoning"):
            assert not pieces, "no text follows a call"
        answer.finish = choice["finish_reason"] or answer.finish
    answer.calls = [(names[index], pieces[index]) for index in sorted(pieces)]
    return answer


def of_response(body: dict[str, Any]) -> Answer:
    answer = Answer(tokens=body["usage"]["output_tokens"])
    for item in body["output"]:
        match item["type"]:
            case "reasoning":
                answer.reasoning += "".join(part["text"] for part in item.get("content") or item["summary"])
            case "message":
                answer.content += "".join(part["text"] for part in item["content"])
            case "function_call":
                answer.calls.append((item["name"], item["arguments"]))
    finish = "tool_calls" if answer.calls else "stop"
    answer.finish = {"completed": finish, "incomplete": "length"}[body["status"]]
    return answer


def of_response_stream(text: str) -> Answer:
    """Checks the deltas against the response of the last event, and returns that."""
    events = [json.loads(data) for data in data_of(text)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    answer = of_response(events[-1]["response"])
    for kind, expected in (
        ("response.output_text.delta", answer.content),
        ("response.reasoning_text.delta", answer.reasoning),
        ("response.function_call_arguments.delta", "".join(arguments for _, arguments in answer.calls)),
    ):
        assert "".join(event["delta"] for event in events if event["type"] == kind) == expected, kind
    return answer


def of_message(body: dict[str, Any]) -> Answer:
    answer = Answer(tokens=body["usage"]["output_tokens"])
    for block in body["content"]:
        match block["type"]:
            case "thinking":
                answer.reasoning += block["thinking"]
            case "text":
                answer.content += block["text"]
            case "tool_use":
                answer.calls.append((block["name"], json.dumps(block["input"], ensure_ascii=False)))
    answer.finish = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}[
        body["stop_reason"]
    ]
    return answer


def of_message_stream(text: str) -> Answer:
    events = [json.loads(data) for data in data_of(text)]
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "message_stop"
    blocks: list[dict[str, Any]] = []
    body: dict[str, Any] = {"content": blocks}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                assert event["index"] == len(blocks) - 1
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        block["json"] += delta["partial_json"]
            case "message_delta":
                body |= {"stop_reason": event["delta"]["stop_reason"], "usage": event["usage"]}
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
    return of_message(body)


def data_of(text: str) -> list[str]:
    lines = text.split("\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


# ── the property ────────────────────────────────────────────────────────────────────────────────

USER = [{"role": "user", "content": "hi"}]
LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object"}}
WRITE: dict[str, Any] = {"name": "write_file", "parameters": {"type": "object"}}
APIS = {
    "/v1/chat/completions": (
        {
            "messages": USER,
            "tools": [{"type": "function", "function": LOOK}, {"type": "function", "function": WRITE}],
        },
        {"stream_options": {"include_usage": True}},
        of_chat,
        of_chat_stream,
    ),
    "/v1/responses": (
        {"input": "hi", "tools": [{"type": "function", **LOOK}, {"type": "function", **WRITE}]},
        {},
        of_response,
        of_response_stream,
    ),
    "/v1/messages": (
        {
            "messages": USER,
            "max_tokens": 99,
            "tools": [
                {"name": "look", "input_schema": {"type": "object"}},
                {"name": "write_file", "input_schema": {"type": "object"}},
            ],
        },
        {},
        of_message,
        of_message_stream,
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerRig]:
    with threaded_server(FakeEngine()) as rig:
        yield rig


@pytest.fixture(scope="module")
def http(server: ServerRig) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", APIS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=answers())
def test_stream_and_whole_answer_hold_what_the_engine_said(
    server: ServerRig, http: httpx.Client, path: str, made: tuple[Answer, list[Step]]
) -> None:
    expected, steps = made

    def play(request: Generate) -> Sequence[Action]:
        mine = [
            Step(
                request_id=request.request_id,
                content=step.content,
                reasoning=step.reasoning,
                tool_calls=step.tool_calls,
            )
            for step in steps
        ]
        return [started(request), *mine, finished(request, expected.finish, tokens=expected.tokens)]

    server.engine.script = play
    body, stream_only, of_whole, of_stream = APIS[path]
    whole = http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    assert of_whole(whole.json()) == expected
    streamed = http.post(path, json={**body, "stream": True, **stream_only})
    assert streamed.status_code == 200, streamed.text
    assert of_stream(streamed.text) == expected


@settings(max_examples=60, deadline=None)
@given(text=texts, borders=st.lists(st.integers(0, 60), max_size=8))
def test_completions_stream_and_whole_answer_hold_the_same(
    server: ServerRig, http: httpx.Client, text: str, borders: list[int]
) -> None:
    edges = sorted({0, len(text), *(min(border, len(text)) for border in borders)})
    pieces = [text[a:b] for a, b in pairwise(edges)]

    def play(request: Generate) -> Sequence[Action]:
        steps = [Step(request_id=request.request_id, content=piece) for piece in pieces]
        return [started(request), *steps, finished(request, tokens=len(steps))]

    server.engine.script = play
    body = {"prompt": "once"}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
    streamed = http.post("/v1/completions", json={**body, "stream": True}).text
    *data, done = events_of(streamed)
    assert done == "[DONE]"
    chunks = [json.loads(each) for each in data]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text
