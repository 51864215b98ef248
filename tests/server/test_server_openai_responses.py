"""The real `openai` client on /v1/responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from fake_engine import Action, FakeEngine, Generate
from pydantic import BaseModel
from scripted_answers import answer, answer_with_calls, answer_with_logprobs
from server_rig import ServerRig, StartServer

from s2moe.engine.messages import Failed

CALL: dict[str, Any] = {"model": "any", "input": "hi"}
PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome"})
TOOLS: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "how warm it is",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    }
]


class Person(BaseModel):
    name: str
    age: int


def client_of(rig: ServerRig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)


def thoughtful(request: Generate) -> Sequence[Action]:
    return answer(request, "Hello 🙂", reasoning="why not", reasoning_tokens=3, cached=4)


async def test_answer_arrives_whole(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(thoughtful))
    async with client_of(rig) as client:
        reply = await client.responses.create(**CALL)
    assert reply.status == "completed"
    assert reply.output_text == "Hello 🙂"
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    assert reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens == 4
    assert reply.usage.output_tokens_details.reasoning_tokens == 3


async def test_events_are_numbered_and_end_with_the_whole_response(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(thoughtful))
    async with client_of(rig) as client:
        events = [event async for event in await client.responses.create(**CALL, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "Hello 🙂"
    assert last.response.id == events[0].response.id
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hello 🙂"
    assert len(deltas) > 1
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert added == [0, 1]


async def test_stream_helper_puts_the_response_together(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(thoughtful))
    async with client_of(rig) as client, client.responses.stream(**CALL) as stream:
        async for _ in stream:
            pass
        reply = await stream.get_final_response()
    assert reply.output_text == "Hello 🙂"


async def test_log_probabilities(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer_with_logprobs(r, ("Hel", -0.5), ("lo", -2.0))))
    asked: dict[str, Any] = {**CALL, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with client_of(rig) as client:
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [[each.token for each in delta.logprobs] for delta in deltas] == [["Hel"], ["lo"]]
    assert [each.token for each in deltas[0].logprobs[0].top_logprobs or ()] == ["Hel", "?"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [each.logprob for each in done.logprobs] == [-0.5, -2.0]
    for reply in (whole, streamed):
        message: Any = reply.output[0]
        logprobs = message.content[0].logprobs
        assert [(each.token, each.logprob, bytes(each.bytes)) for each in logprobs] == [
            ("Hel", -0.5, b"Hel"),
            ("lo", -2.0, b"lo"),
        ]
        assert [[top.logprob for top in each.top_logprobs] for each in logprobs] == [
            [-0.5, -1.5],
            [-2.0, -3.0],
        ]
        assert reply.top_logprobs == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_parallel_calls(start_server: StartServer, streamed: bool) -> None:
    rig = await start_server(FakeEngine(lambda r: answer_with_calls(r, PARIS, ROME)))
    async with client_of(rig) as client:
        if streamed:
            async with client.responses.stream(**CALL, tools=TOOLS) as stream:
                reply: Any = await stream.get_final_response()
        else:
            reply = await client.responses.create(**CALL, tools=TOOLS)
    calls = [item for item in reply.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [PARIS, ROME]
    assert len({call.call_id for call in calls}) == 2


async def test_history_of_calls_reaches_the_engine(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, "21 degrees")))
    async with client_of(rig) as client:
        reply = await client.responses.create(
            model="any",
            tools=TOOLS,
            instructions="be brief",
            input=[
                {"role": "user", "content": "how warm is it?"},
                {
                    "type": "function_call",
                    "call_id": "call_1",
                    "name": "get_weather",
                    "arguments": '{"city":"Paris"}',
                },
                {"type": "function_call_output", "call_id": "call_1", "output": "21"},
            ],
        )
    assert reply.output_text == "21 degrees"
    messages = json.loads(rig.engine.requests[0].messages_json)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert messages[3]["tool_call_id"] == "call_1"


async def test_parse_reads_a_schema(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, '{"name":"Ada","age":36}')))
    async with client_of(rig) as client:
        reply = await client.responses.parse(**CALL, text_format=Person)
    assert reply.output_parsed == Person(name="Ada", age=36)
    assert "json_schema" in json.loads(rig.engine.requests[0].chat_options_json)


async def test_cut_answer_is_incomplete(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: answer(r, "Once upon", reason="length")))
    async with client_of(rig) as client:
        reply = await client.responses.create(**CALL, max_output_tokens=3)
        events = [event async for event in await client.responses.create(**CALL, stream=True)]
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"
    assert rig.engine.requests[0].max_tokens == 3


async def test_errors_keep_their_status(start_server: StartServer) -> None:
    def overflow(request: Generate) -> Sequence[Action]:
        return [
            Failed(
                request_id=request.request_id,
                code="context_length_exceeded",
                message="too long",
                n_prompt_tokens=9,
                n_ctx=8,
            )
        ]

    rig = await start_server(FakeEngine(overflow))
    async with client_of(rig) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(**CALL, stream=stream)
            assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as stateful:
            await client.responses.create(**CALL, previous_response_id="resp_1")
        assert stateful.value.param == "previous_response_id"
