"""Tools: what is offered to the engine, what of the history, and how calls leave."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from fake_engine import MODEL, Action, FakeEngine, Generate, finished, started, step
from scripted_answers import answer_with_calls, call_id
from server_rig import ServerRig, StartServer, chat, chunks_of
from test_server_errors import assert_invalid

from s2moe.engine.messages import Step, ToolCallDelta

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "looks around",
        "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}},
    },
}
WAIT: dict[str, Any] = {"type": "function", "function": {"name": "wait", "strict": True}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def options_of(rig: ServerRig) -> dict[str, Any]:
    """What the last request told the engine about the chat."""
    options = json.loads(rig.engine.requests[-1].chat_options_json)
    assert isinstance(options, dict)
    return options


async def test_tools_reach_the_engine_with_all_that_it_needs(rig: ServerRig) -> None:
    assert (await rig.post(chat(tools=[LOOK, WAIT]))).status_code == 200
    wait = {"name": "wait", "parameters": {"type": "object", "properties": {}}, "strict": True}
    assert options_of(rig) == {
        "tools": [LOOK, {"type": "function", "function": wait}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }


async def test_nothing_is_said_of_tools_where_there_are_none(rig: ServerRig) -> None:
    for fields in ({}, {"tools": []}, {"tools": None, "tool_choice": "none", "parallel_tool_calls": True}):
        await rig.post(chat(**fields))
        assert options_of(rig) == {}


async def test_choice_none_shows_no_tool_to_the_model(rig: ServerRig) -> None:
    await rig.post(chat(tools=[LOOK], tool_choice="none"))
    assert options_of(rig) == {}


@pytest.mark.parametrize(
    ("choice", "names", "wire"),
    [
        (None, ["look", "wait"], "auto"),
        ("auto", ["look", "wait"], "auto"),
        ("required", ["look", "wait"], "required"),
        ({"type": "function", "function": {"name": "wait"}}, ["wait"], "required"),
    ],
)
async def test_choice_decides_what_is_offered(
    rig: ServerRig, choice: object, names: list[str], wire: str
) -> None:
    await rig.post(chat(tools=[LOOK, WAIT], tool_choice=choice, parallel_tool_calls=False))
    options = options_of(rig)
    assert [each["function"]["name"] for each in options["tools"]] == names
    assert (options["tool_choice"], options["parallel_tool_calls"]) == (wire, False)


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0].type", "'web_search'"),
        ({"tools": [LOOK, {"type": 5, "function": {}}]}, "invalid_value", "tools[1].type", "function"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function", ""),
        ({"tools": [tool(name="a b")]}, "invalid_value", "tools[0].function.name", "pattern"),
        ({"tools": [tool(name="")]}, "invalid_value", "tools[0].function.name", "pattern"),
        ({"tools": [tool(name="x" * 65)]}, "invalid_value", "tools[0].function.name", "pattern"),
        ({"tools": [tool(parameters=[])]}, "invalid_schema", "tools[0].function.parameters", "object"),
        (
            {"tools": [tool(parameters={"type": "array"})]},
            "invalid_schema",
            "tools[0].function.parameters",
            "object",
        ),
        (
            {"tools": [tool(parameters={"type": "object", "description": "x" * 300_000})]},
            "invalid_schema",
            "tools[0].function.parameters",
            "262144",
        ),
        ({"tools": [LOOK, LOOK]}, "invalid_value", "tools[1].function.name", "look"),
        ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "invalid_value", "tools", "128"),
        ({"tools": {}}, "invalid_value", "tools", ""),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice", "tools"),
        ({"tools": [LOOK], "tool_choice": "look"}, "invalid_value", "tool_choice", "required"),
        ({"tools": [LOOK], "tool_choice": {"type": "custom"}}, "invalid_value", "tool_choice", "'custom'"),
        ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "invalid_value", "tool_choice", "name"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "wait"}}},
            "invalid_value",
            "tool_choice",
            "`wait`",
        ),
        ({"tools": [LOOK], "grammar": 'root ::= "a"'}, "invalid_value", "grammar", "tools"),
        (
            {
                "tools": [LOOK],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "invalid_value",
            "response_format",
            "tool call",
        ),
    ],
)
async def test_wrong_tools_are_named(
    rig: ServerRig, fields: dict[str, Any], code: str, param: str, words: str
) -> None:
    for stream in (False, True):
        assert words in assert_invalid(await rig.post(chat(**fields, stream=stream)), code, param)
    assert rig.engine.requests == []


@pytest.mark.parametrize("depth", [64, 70, 900])
async def test_schema_may_be_deep_but_not_too_deep(rig: ServerRig, depth: int) -> None:
    parameters: dict[str, Any] = {}
    for _ in range(depth - 1):
        parameters = {"properties": parameters}
    reply = await rig.post(chat(tools=[tool(parameters=parameters)]))
    if depth <= 64:
        assert reply.status_code == 200
    else:
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] in ("invalid_schema", "invalid_json")
    assert (await rig.post(chat())).status_code == 200


async def test_whole_numbers_of_any_size_are_no_500(rig: ServerRig) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**30}}}
    assert (await rig.post(chat(tools=[tool(parameters=parameters)]))).status_code == 200
    assert options_of(rig)["tools"][0]["function"]["parameters"] == parameters
    body = json.dumps(chat(tools=[tool(parameters={"type": "object", "default": "NUMBER"})]))
    reply = await rig.post(content=body.replace('"NUMBER"', "9" * 6000).encode())
    assert reply.status_code in (200, 400)


# ── the history ─────────────────────────────────────────────────────────────────────────────────


def called(arguments: object = "{}", **fields: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call | fields]}


def result(**fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": "a wall"} | fields


USER = {"role": "user", "content": "hi"}


async def test_calls_and_results_reach_the_engine(rig: ServerRig) -> None:
    first = called('{"far": true}') | {"reasoning_content": "hm", "reasoning": "other name"}
    second = called(" ", id="call_2") | {"content": "Again.", "reasoning": "hm"}
    messages = [USER, first, result(), second, result(tool_call_id="call_2", name="own", content=[])]
    assert (await rig.post({"messages": messages})).status_code == 200
    _, one, two, three, four = json.loads(rig.engine.requests[0].messages_json)
    assert one == {**called('{"far": true}'), "reasoning_content": "hm"}
    assert two == {"role": "tool", "content": "a wall", "tool_call_id": "call_1", "name": "look"}
    assert three["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert (three["content"], three["reasoning_content"]) == ("Again.", "hm")
    assert four == {"role": "tool", "content": "", "tool_call_id": "call_2", "name": "own"}


async def test_refusal_in_the_history_is_text(rig: ServerRig) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "refusal": "No."},
        USER,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
        USER,
    ]
    assert (await rig.post({"messages": messages})).status_code == 200
    wire = json.loads(rig.engine.requests[0].messages_json)
    assert [wire[1]["content"], wire[3]["content"]] == ["No.", "Never."]


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([USER, called("{"), result(), USER], "messages[1].tool_calls[0].function.arguments", "JSON"),
        ([USER, called("[1]"), result(), USER], "messages[1].tool_calls[0].function.arguments", "object"),
        ([USER, called({}), result(), USER], "messages[1].tool_calls[0].function.arguments", "string"),
        (
            [USER, called('{"a":' * 70 + "1" + "}" * 70), result(), USER],
            "messages[1].tool_calls[0].function.arguments",
            "deep",
        ),
        ([USER, called("{}", id=""), result(), USER], "messages[1].tool_calls[0].id", ""),
        ([USER, called("{}", type="custom"), result(), USER], "messages[1].tool_calls[0].type", "function"),
        ([USER, result()], "messages[1].tool_call_id", "call_1"),
        ([USER, result(), called()], "messages[1].tool_call_id", "call_1"),
        ([USER, called(), result(tool_call_id="call_7"), USER], "messages[2].tool_call_id", "call_7"),
        ([USER, called(), result(tool_call_id=None)], "messages[2]", "tool_call_id"),
        ([USER, called(), result(content=7)], "messages[2].content", "content"),
        ([USER, called()], "messages[1].tool_calls", "not answered"),
    ],
)
async def test_broken_history_names_the_message(
    rig: ServerRig, messages: list[dict[str, Any]], param: str, words: str
) -> None:
    for stream in (False, True):
        reply = await rig.post({"messages": messages, "stream": stream})
        assert words in assert_invalid(reply, "invalid_value", param)
    assert rig.engine.requests == []


async def test_arguments_and_tools_count_towards_the_context(start_server: StartServer) -> None:
    engine = FakeEngine()
    engine.model = msgspec.structs.replace(MODEL, n_ctx=512, longest_piece_bytes=16)
    rig = await start_server(engine)
    long = "x" * (512 * 16)
    for fields in (
        {"messages": [USER, called(json.dumps({"a": long})), result()]},
        {"messages": [USER], "tools": [tool(description=long)]},
    ):
        reply = await rig.post(fields)
        text = assert_invalid(reply, "context_length_exceeded", "messages")
        assert "maximum context length is 512 tokens" in text
    # reasoning of earlier answers is left out by most templates, and tools that are not offered always
    messages = [USER, {"role": "assistant", "content": "a", "reasoning_content": long}, USER]
    assert (await rig.post({"messages": messages})).status_code == 200
    tools = [tool(description=long), LOOK]
    assert (await rig.post(chat(tools=tools, tool_choice="none"))).status_code == 200


# ── the answer ──────────────────────────────────────────────────────────────────────────────────


def two_calls(request: Generate) -> list[Action]:
    return list(answer_with_calls(request, ("look", {"far": True}), ("wait", {}), before="So"))


async def test_calls_are_streamed_in_the_order_that_clients_need(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(two_calls))
    chunks = chunks_of((await rig.post(chat(tools=[LOOK, WAIT], stream=True))).text)

    def opening(index: int, name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": ""}
        return {"index": index, "id": call_id(index), "type": "function", "function": function}

    def piece(index: int, arguments: str) -> dict[str, Any]:
        return {"index": index, "function": {"arguments": arguments}}

    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": None},
        {"content": "So"},
        {"tool_calls": [opening(0, "look")]},
        *({"tool_calls": [piece(0, text)]} for text in ('{"fa', 'r": ', "true", "}")),
        {"tool_calls": [opening(1, "wait")]},
        {"tool_calls": [piece(1, "{}")]},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_all_parts_of_one_step_leave_in_chunks_of_their_own(start_server: StartServer) -> None:
    def all_at_once(request: Generate) -> list[Action]:
        calls = [
            ToolCallDelta(index=0, id="call_a", name="look", arguments="{"),
            ToolCallDelta(index=0, arguments="}"),
            ToolCallDelta(index=1, id="call_b", name="wait", arguments="{}"),
        ]
        everything = Step(request_id=request.request_id, content="c", reasoning="r", tool_calls=calls)
        return [started(request), everything, finished(request, "tool_calls")]

    rig = await start_server(FakeEngine(all_at_once))
    chunks = chunks_of((await rig.post(chat(stream=True))).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks][1:-1]
    assert [list(delta) for delta in deltas] == [
        ["reasoning_content", "reasoning"],
        ["content"],
        *[["tool_calls"]] * 5,
    ]
    calls = [delta["tool_calls"][0] for delta in deltas[2:]]
    assert [call.get("id") for call in calls] == ["call_a", None, None, "call_b", None]
    assert [call["function"]["arguments"] for call in calls] == ["", "{", "}", "", "{}"]
    message = (await rig.post(chat())).json()["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ["{}", "{}"]


async def test_content_is_null_when_there_are_only_calls(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer_with_calls(r, ("look", {"far": True}))))
    (choice,) = (await rig.post(chat(tools=[LOOK]))).json()["choices"]
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": call_id(0),
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"far": true}'},
                }
            ],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
    }


async def test_calls_cut_by_the_limit_stay_as_they_are(start_server: StartServer) -> None:
    def cut(request: Generate) -> list[Action]:
        opening = ToolCallDelta(index=0, id="call_a", name="look", arguments='{"fa')
        first = Step(request_id=request.request_id, tool_calls=[opening])
        return [started(request), step(request, "a"), first, finished(request, "length")]

    rig = await start_server(FakeEngine(cut))
    (choice,) = (await rig.post(chat(tools=[LOOK]))).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "a"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"fa'
