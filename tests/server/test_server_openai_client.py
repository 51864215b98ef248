"""The real `openai` client against the server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from fake_engine import Action, FakeEngine, Generate, endless, finished, hello, started, step
from server_rig import ServerRig, StartServer

from s2moe.engine.messages import Failed
from s2moe.server.engine_client import EngineDiedError

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CALL: dict[str, Any] = {"model": "any", "messages": MESSAGES}


def client_of(rig: ServerRig, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, **options)


async def test_async_client_reads_whole_answers(rig: ServerRig) -> None:
    async with client_of(rig) as client:
        answer = await client.chat.completions.create(**CALL)
        assert answer.choices[0].message.content == "Hello"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 12
        assert answer._request_id is not None
        assert [model.id async for model in client.models.list()] == ["demo"]
        assert (await client.models.retrieve("demo")).id == "demo"


async def test_async_client_reads_streams(rig: ServerRig) -> None:
    async with client_of(rig) as client:
        stream = await client.chat.completions.create(
            **CALL, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_stream_helper_puts_the_answer_together(rig: ServerRig) -> None:
    async with client_of(rig) as client, client.chat.completions.stream(**CALL) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        answer = await stream.get_final_completion()
    assert deltas == ["Hel", "lo"]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"


async def test_sync_client_works_too(rig: ServerRig) -> None:
    def use() -> tuple[str | None, str, str | None]:
        with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(**CALL).choices[0].message.content
            stream = client.chat.completions.create(**CALL, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            with client.chat.completions.stream(**CALL) as helper:
                helped = helper.get_final_completion().choices[0].message.content
        return whole, streamed, helped

    assert await asyncio.to_thread(use) == ("Hello", "Hello", "Hello")


async def test_errors_arrive_typed_with_code_and_param(start_server: StartServer) -> None:
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
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{**CALL, "temperature": 9})
        assert (caught.value.code, caught.value.param) == ("invalid_value", "temperature")
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**CALL, stream=stream)
            assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.models.retrieve("other")
        assert missing.value.code == "model_not_found"


async def test_wrong_key_is_an_authentication_error(start_server: StartServer) -> None:
    rig = await start_server(api_key="right")
    async with client_of(rig) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**CALL)


async def test_error_event_raises_in_the_middle_of_a_stream(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(lambda r: [started(r), step(r, "a"), EngineDiedError("gone", generation_began=True)])
    )
    async with client_of(rig) as client:
        stream = await client.chat.completions.create(**CALL, stream=True)
        seen = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
        with pytest.raises(openai.APIError, match="gone"):
            await anext(stream)
    assert seen == [None, "a"]


async def test_client_does_not_retry_after_generation_began(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(lambda r: [started(r), step(r, "a"), EngineDiedError("gone", generation_began=True)])
    )
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=2) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(**CALL)
    assert len(rig.engine.requests) == 1


async def test_client_retries_by_itself_when_nothing_was_begun(start_server: StartServer) -> None:
    def dies_once(request: Generate) -> Sequence[Action]:
        if len(rig.engine.requests) == 1:
            return [EngineDiedError("gone", generation_began=False)]
        return hello(request)

    rig = await start_server(FakeEngine(dies_once))
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=1) as client:
        answer = await client.chat.completions.create(**CALL)
    assert answer.choices[0].message.content == "Hello"


async def test_closing_a_stream_aborts_the_request(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless))
    async with client_of(rig) as client:
        stream = await client.chat.completions.create(**CALL, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await rig.engine.until_aborted("hi")
    await rig.until_idle()


async def test_reasoning_reaches_the_client(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(lambda r: [started(r), step(r, reasoning="why"), step(r, "so"), finished(r)])
    )
    async with client_of(rig) as client:
        message = (await client.chat.completions.create(**CALL)).choices[0].message
        extra = message.model_extra or {}
        assert (extra["reasoning_content"], extra["reasoning"], message.content) == ("why", "why", "so")
