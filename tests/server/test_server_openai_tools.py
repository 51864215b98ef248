"""The real `openai` client: tools, schemas, log probabilities, several choices."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from fake_engine import Action, FakeEngine, Generate, Script, finished, started
from pydantic import BaseModel
from scripted_answers import answer, answer_with_calls, answer_with_logprobs, call_id, call_steps
from server_rig import ServerRig, StartServer

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CALL: dict[str, Any] = {"model": "any", "messages": MESSAGES}
PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome", "unit": "°C"})
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "how warm it is",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


class Person(BaseModel):
    name: str
    age: int


ADA = Person(name="Ada", age=36)


def client_of(rig: ServerRig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)


def both_calls(request: Generate) -> Sequence[Action]:
    return answer_with_calls(request, PARIS, ROME, before="Let me see.")


def seen_calls(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


async def test_parallel_calls_arrive_whole(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(both_calls))
    async with client_of(rig) as client:
        reply = await client.chat.completions.create(**CALL, tools=TOOLS)
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert seen_calls(choice.message.tool_calls) == [PARIS, ROME]
    assert [call.id for call in choice.message.tool_calls or []] == [call_id(0), call_id(1)]
    assert {call.type for call in choice.message.tool_calls or []} == {"function"}


async def test_parallel_calls_arrive_in_a_stream(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(both_calls))
    async with client_of(rig) as client:
        stream = await client.chat.completions.create(**CALL, tools=TOOLS, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    pieces = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    for index, expected in enumerate((PARIS, ROME)):
        mine = [piece for piece in pieces if piece.index == index]
        assert [piece.id for piece in mine if piece.id is not None] == [call_id(index)]
        names = [piece.function.name for piece in mine if piece.function and piece.function.name is not None]
        assert names == [expected[0]]
        assert mine[0].type == "function"
        assert mine[0].id == call_id(index)
        text = "".join(piece.function.arguments or "" for piece in mine if piece.function)
        assert json.loads(text) == expected[1]
    first_call = next(index for index, choice in enumerate(choices) if choice.delta.tool_calls)
    assert not any(choice.delta.content for choice in choices[first_call:])
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


async def test_stream_helper_puts_calls_together(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(both_calls))
    async with client_of(rig) as client, client.chat.completions.stream(**CALL, tools=TOOLS) as stream:
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        (choice,) = (await stream.get_final_completion()).choices
    assert [(event.name, json.loads(event.arguments)) for event in done] == [PARIS, ROME]
    assert choice.message.role == "assistant"
    assert [call.id for call in choice.message.tool_calls or []] == [call_id(0), call_id(1)]
    assert seen_calls(choice.message.tool_calls) == [PARIS, ROME]


async def test_history_with_calls_and_results_reaches_the_engine(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, "21 degrees")))
    async with client_of(rig) as client:
        reply = await client.chat.completions.create(
            model="any",
            tools=TOOLS,
            messages=[
                {"role": "user", "content": "how warm is it?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "21"},
            ],
        )
    assert reply.choices[0].message.content == "21 degrees"
    _, assistant, tool = json.loads(rig.engine.requests[0].messages_json)
    (call,) = assistant["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert (call["id"], tool["tool_call_id"], tool["content"]) == ("call_1", "call_1", "21")
    (tool_seen,) = json.loads(rig.engine.requests[0].chat_options_json)["tools"]
    assert tool_seen["function"]["name"] == "get_weather"


async def test_calls_cut_by_the_limit_are_not_repaired(start_server: StartServer) -> None:
    def cut(request: Generate) -> Sequence[Action]:
        steps = list(call_steps(request, PARIS))[:-1]
        return [started(request), *steps, finished(request, "length", tokens=len(steps))]

    rig = await start_server(FakeEngine(cut))
    async with client_of(rig) as client:
        reply = await client.chat.completions.create(**CALL, tools=TOOLS)
    (call,) = reply.choices[0].message.tool_calls or []
    assert reply.choices[0].finish_reason == "length"
    assert json.dumps(PARIS[1]).startswith(call.function.arguments)  # type: ignore[union-attr]


async def test_parse_reads_a_schema(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, ADA.model_dump_json())))
    async with client_of(rig) as client:
        reply = await client.chat.completions.parse(**CALL, response_format=Person)
    assert reply.choices[0].message.parsed == ADA
    schema = json.loads(rig.engine.requests[0].chat_options_json)["json_schema"]
    assert set(schema["properties"]) == {"name", "age"}
    assert schema["additionalProperties"] is False


async def test_stream_helper_reads_a_schema(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, ADA.model_dump_json())))
    async with (
        client_of(rig) as client,
        client.chat.completions.stream(**CALL, response_format=Person) as stream,
    ):
        done = [event async for event in stream if event.type == "content.done"]
        reply = await stream.get_final_completion()
    assert [event.parsed for event in done] == [ADA]
    assert reply.choices[0].message.parsed == ADA


async def test_cut_schema_raises_in_the_client(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, '{"name":"A', reason="length")))
    async with client_of(rig) as client:
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(**CALL, response_format=Person)


async def test_log_probabilities_arrive_whole_and_streamed(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer_with_logprobs(r, ("Hel", -0.5), ("lo", -2.0))))
    asked: dict[str, Any] = {**CALL, "logprobs": True, "top_logprobs": 2}
    async with client_of(rig) as client:
        whole = (await client.chat.completions.create(**asked)).choices[0].logprobs
        stream = await client.chat.completions.create(**asked, stream=True)
        streamed = [
            token
            async for chunk in stream
            for token in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
        ]
    assert whole is not None
    for tokens in (whole.content or [], streamed):
        assert [(token.token, token.logprob, token.bytes) for token in tokens] == [
            ("Hel", -0.5, list(b"Hel")),
            ("lo", -2.0, list(b"lo")),
        ]
        assert [[(top.token, top.logprob) for top in token.top_logprobs] for token in tokens] == [
            [("Hel", -0.5), ("?", -1.5)],
            [("lo", -2.0), ("?", -3.0)],
        ]


async def test_no_log_probabilities_unless_asked(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer_with_logprobs(r, ("a", -0.5))))
    async with client_of(rig) as client:
        reply = await client.chat.completions.create(**CALL)
    assert reply.choices[0].logprobs is None
    assert rig.engine.requests[0].n_top_logprobs is None


def numbered() -> Script:
    """Each request is answered with its number."""
    numbers = itertools.count()
    return lambda request: answer(request, f"answer {next(numbers)}", tokens=3)


async def test_two_choices_are_answered_whole(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(numbered()))
    async with client_of(rig) as client:
        reply = await client.chat.completions.create(**CALL, n=2)
    assert [(choice.index, choice.message.content) for choice in reply.choices] == [
        (0, "answer 0"),
        (1, "answer 1"),
    ]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (10, 6)


async def test_two_choices_are_streamed_index_0_first(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(numbered()))
    async with client_of(rig) as client, client.chat.completions.stream(**CALL, n=2) as stream:
        indices = [
            event.chunk.choices[0].index
            async for event in stream
            if event.type == "chunk" and event.chunk.choices
        ]
        reply = await stream.get_final_completion()
    assert indices[0] == 0
    texts = [choice.message.content for choice in sorted(reply.choices, key=lambda each: each.index)]
    assert texts == ["answer 0", "answer 1"]
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "stop"]


async def test_embeddings_of_a_chat_model_are_a_clear_400(rig: ServerRig) -> None:
    async with client_of(rig) as client:
        with pytest.raises(openai.BadRequestError, match="embedding"):
            await client.embeddings.create(model="any", input="text")


async def test_completions_endpoint_streams_and_answers_whole(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, "once upon a time")))
    async with client_of(rig) as client:
        whole = await client.completions.create(model="any", prompt="tell")
        stream = await client.completions.create(model="any", prompt="tell", stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    assert whole.choices[0].text == streamed == "once upon a time"
    assert [request.prompt for request in rig.engine.requests] == ["tell", "tell"]
