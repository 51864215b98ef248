"""Responses and Messages with the real engine: what a grammar forces and what is counted.

The tiny model answers nonsense.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from e2e_rig import ServeProcess

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "What is the weather in Paris?"}
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "name": "get_weather", "description": "how warm it is", "parameters": SCHEMA}
TOOL = {"name": "get_weather", "description": "how warm it is", "input_schema": SCHEMA}


def respond(server: ServeProcess, **fields: Any) -> httpx.Response:
    body = {"input": USER["content"], "max_output_tokens": 200, "temperature": 0, **fields}
    reply = server.client.post(RESPONSES, json=body)
    assert reply.status_code == 200, reply.text
    return reply


def send(server: ServeProcess, path: str = MESSAGES, **fields: Any) -> httpx.Response:
    body = {"messages": [USER], "max_tokens": 200, "temperature": 0, **fields}
    reply = server.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    blocks = reply.text.split("\n\n")
    return [json.loads(block.split("data: ", 1)[1]) for block in blocks if "data: " in block]


def test_response_is_the_same_whole_and_streamed(server: ServeProcess) -> None:
    whole = respond(server, max_output_tokens=12).json()
    events = events_of(respond(server, max_output_tokens=12, stream=True))
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    text = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"] == last["output"][0]["content"][0]["text"]
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("tools", [None, [FUNCTION]])
def test_log_probabilities_are_those_of_the_text(server: ServeProcess, tools: Any) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 3, "tools": tools, "top_p": 0}
    whole = respond(server, max_output_tokens=20, **asked).json()
    events = events_of(respond(server, max_output_tokens=20, stream=True, **asked))
    streamed = events[-1]["response"]
    for response in (whole, streamed):
        (part,) = response["output"][0]["content"]
        text = part["text"].encode()
        said = b"".join(bytes(each["bytes"]) for each in part["logprobs"])
        assert said.startswith(text)
        assert len(said) - len(text) < 4  # the last character may be cut
        assert all(len(each["top_logprobs"]) == 3 for each in part["logprobs"])
    deltas = [each["logprobs"] for each in events if each["type"] == "response.output_text.delta"]
    assert len(deltas) > 1
    assert [each for delta in deltas for each in delta] == streamed["output"][0]["content"][0]["logprobs"]


def test_message_is_the_same_whole_and_streamed(server: ServeProcess) -> None:
    whole = send(server, max_tokens=12).json()
    events = events_of(send(server, max_tokens=12, stream=True))
    assert [events[0]["type"], events[1]["type"], events[-1]["type"]] == [
        "message_start",
        "ping",
        "message_stop",
    ]
    deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
    assert "".join(each["text"] for each in deltas) == whole["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]


def test_required_function_is_called(server: ServeProcess) -> None:
    tools = [{"type": "web_search"}, FUNCTION]
    asked = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = respond(server, **asked).json()["output"]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert json.loads(call["arguments"])["unit"] in ("C", "F")
    streamed = events_of(respond(server, **asked, stream=True))[-1]["response"]["output"][0]
    assert json.loads(streamed["arguments"]) == json.loads(call["arguments"])
    history = [USER, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}]
    assert respond(server, input=history, tools=tools, max_output_tokens=4).json()["output"]


def test_required_tool_is_used(server: ServeProcess) -> None:
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    asked = {"tools": [TOOL], "tool_choice": choice}
    message = send(server, **asked).json()
    (use,) = message["content"]
    assert (use["type"], message["stop_reason"]) == ("tool_use", "tool_use")
    assert use["input"]["unit"] in ("C", "F")
    deltas = [each["delta"] for each in events_of(send(server, **asked, stream=True)) if "delta" in each]
    assert json.loads("".join(each.get("partial_json", "") for each in deltas)) == use["input"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "21"}
    history = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert send(server, messages=history, tools=[TOOL], max_tokens=4).json()["content"]


def test_text_matches_the_schema(server: ServeProcess) -> None:
    form = {"type": "json_schema", "name": "m", "schema": SCHEMA}
    answer = respond(server, text={"format": form}).json()
    assert json.loads(answer["output"][-1]["content"][0]["text"])["unit"] in ("C", "F")
    message = send(server, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).json()
    assert json.loads(message["content"][-1]["text"])["unit"] in ("C", "F")


def test_stop_sequence_is_named(server: ServeProcess) -> None:
    text = send(server, max_tokens=12).json()["content"][0]["text"]
    stop = text[3:5]
    message = send(server, max_tokens=12, stop_sequences=[stop]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert stop not in message["content"][0]["text"]


def test_counted_tokens_are_those_of_the_prompt(server: ServeProcess) -> None:
    asked = {"system": "Be brief.", "tools": [TOOL]}
    counted = send(server, f"{MESSAGES}/count_tokens", **asked).json()["input_tokens"]
    usage = send(server, **asked, max_tokens=2).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    again = send(server, **asked, max_tokens=2).json()["usage"]
    assert again["cache_read_input_tokens"] > 0
    reply = server.client.post(f"{RESPONSES}/input_tokens", json={"input": "hi", "tools": [FUNCTION]})
    response = respond(server, input="hi", tools=[FUNCTION], max_output_tokens=2).json()
    assert reply.json()["input_tokens"] == response["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (RESPONSES, {"tools": [{"type": "mcp"}, FUNCTION]}, "tools[1].parameters"),
        (MESSAGES, {"max_tokens": 5, "tools": [{"type": "bash_20250124"}, TOOL]}, "tools[1].input_schema"),
    ],
)
def test_bad_schema_of_a_tool_names_the_place(
    server: ServeProcess, path: str, fields: dict[str, Any], place: str
) -> None:
    bad = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    key = place.rpartition(".")[2]
    tools = [fields["tools"][0], {**fields["tools"][1], key: bad}]
    conversation = {"input": "hi"} if path == RESPONSES else {"messages": [USER]}
    choice = "required" if path == RESPONSES else {"type": "any"}
    reply = server.client.post(path, json={**fields, **conversation, "tools": tools, "tool_choice": choice})
    assert reply.status_code == 400, reply.text
    assert place in reply.json()["error"]["message"]
