"""Tools, formats, continuation, log probabilities and several choices, with the real engine.

The tiny model answers nonsense; what a grammar forces and what is counted holds all the same.
"""

from __future__ import annotations

import json
from typing import Any

from e2e_rig import ServeProcess

USER = {"role": "user", "content": "What is the weather in Paris?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "how warm it is",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


def ask(server: ServeProcess, **fields: Any) -> dict[str, Any]:
    body = {"messages": [USER], "max_tokens": 200, "temperature": 0, **fields}
    reply = server.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert isinstance(answer, dict)
    return answer


def chunks(server: ServeProcess, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": [USER], "max_tokens": 200, "temperature": 0, "stream": True, **fields}
    reply = server.client.post("/v1/chat/completions", json=body)
    *events, done = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if "data: " in line]
    assert done == "[DONE]", reply.text
    return [json.loads(event) for event in events]


def test_required_tool_is_called_whole_and_streamed(server: ServeProcess) -> None:
    # the tiny model would call for ever, were it allowed several calls
    asked = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = ask(server, **asked)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["unit"] in ("C", "F")
    choices = [chunk["choices"][0] for chunk in chunks(server, **asked)]
    deltas = [each for choice in choices for each in choice["delta"].get("tool_calls") or []]
    assert deltas[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert deltas[0]["id"].startswith("call_")
    text = "".join(each["function"]["arguments"] for each in deltas if each["index"] == 0)
    assert json.loads(text) == json.loads(call["function"]["arguments"])
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_calls_and_their_results_are_rendered(server: ServeProcess) -> None:
    function = {"name": "get_weather", "arguments": '{"unit": "C"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
    ]
    answer = ask(server, messages=messages, tools=[TOOL], tool_choice="auto", max_tokens=8)
    assert answer["usage"]["prompt_tokens"] > 10


def test_content_matches_the_schema(server: ServeProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}, "ok": {"type": "boolean"}},
        "required": ["mood", "ok"],
        "additionalProperties": False,
    }
    format_ = {"type": "json_schema", "json_schema": {"name": "m", "schema": schema, "strict": True}}
    (choice,) = ask(server, response_format=format_)["choices"]
    content = json.loads(choice["message"]["content"])
    assert content["mood"] in ("good", "bad")
    assert isinstance(content["ok"], bool)


def test_bad_schema_names_the_place(server: ServeProcess) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    format_ = {"type": "json_schema", "json_schema": {"name": "m", "schema": schema}}
    body = {"messages": [USER], "response_format": format_}
    reply = server.client.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_schema", "response_format")
    assert "/properties/a" in error["message"]


def test_last_message_of_the_assistant_is_continued(server: ServeProcess) -> None:
    prefill = {"role": "assistant", "content": "The weather in Paris is"}
    continued = ask(server, messages=[USER, prefill], max_tokens=4)
    anew = ask(server, messages=[USER, prefill], max_tokens=4, add_generation_prompt=True)
    assert not continued["choices"][0]["message"]["content"].startswith(prefill["content"])
    assert continued["usage"]["prompt_tokens"] < anew["usage"]["prompt_tokens"]


def test_log_probabilities_are_those_of_the_answer(server: ServeProcess) -> None:
    (choice,) = ask(server, max_tokens=6, logprobs=True, top_logprobs=3)["choices"]
    tokens = choice["logprobs"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == choice["message"]["content"]
    for token in tokens:
        assert len(token["top_logprobs"]) == 3
        assert token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0  # temperature 0


def test_choices_differ_by_their_seed_and_share_the_prompt(server: ServeProcess) -> None:
    answer = ask(server, n=3, seed=1, temperature=1.5, max_tokens=12)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert texts[1] == ask(server, seed=2, temperature=1.5, max_tokens=12)["choices"][0]["message"]["content"]


def test_progress_ends_with_the_whole_prompt(server: ServeProcess) -> None:
    long = {"role": "user", "content": "count " * 1200}
    progress = [
        chunk["prompt_progress"]
        for chunk in chunks(server, messages=[long], max_tokens=2, return_progress=True)
        if "prompt_progress" in chunk
    ]
    assert len(progress) > 2
    assert progress[0]["processed"] == progress[0]["cache"]
    assert progress[-1]["processed"] == progress[-1]["total"]
    assert [each["processed"] for each in progress] == sorted({each["processed"] for each in progress})
