"""An answer that cannot be encoded: the client gets an error, and the engine goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_engine import Action, FakeEngine, Generate, finished, hello, started, step
from server_rig import ServerRig, StartServer, chat, events_of

from s2moe.engine.messages import GenerationEvent, Step
from s2moe.server.answering import GenerationStream
from s2moe.server.engine_client import EventSink
from s2moe.server.stream.chat_chunks import ChatChunkEncoder
from s2moe.server.stream.chat_completion import ChatCompletionBuilder

FATAL = "b"
"""The content that cannot be encoded."""


def slow_letters(request: Generate) -> list[Action]:
    """So slow that the consumer waits for each."""
    steps: list[Action] = [each for letter in "abc" for each in (step(request, letter), 0.05)]
    return [started(request), *steps, finished(request)]


class SocketEngine(FakeEngine):
    """Keeps what its sink raises: in the real one it would end the process."""

    raised: list[Exception]
    ends_at_once = False
    """The end comes with the fatal step in one read of the socket."""

    async def run(self, request: Generate, sink: EventSink) -> None:
        self.raised = []

        def guarded(event: GenerationEvent) -> None:
            try:
                sink(event)
                if self.ends_at_once and isinstance(event, Step) and event.content == FATAL:
                    sink(finished(request))
            except Exception as error:
                self.raised.append(error)

        await super().run(request, guarded)


@pytest.fixture
def fed_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Breaks the encoder; names of the tasks that fed it with what it cannot encode."""
    feed = ChatChunkEncoder.feed
    names: list[str] = []

    def broken(self: ChatChunkEncoder, given: Step) -> bytes:
        if given.content == FATAL:
            task = asyncio.current_task()
            names.append("" if task is None else task.get_name())
            raise ValueError("secret detail")
        return feed(self, given)

    monkeypatch.setattr(ChatChunkEncoder, "feed", broken)
    return names


async def requests_that_ended(rig: ServerRig, finish: str, *, stream: bool = True) -> float:
    labels = {"model": "demo", "api": "chat", "stream": str(stream).lower(), "finish": finish}
    return await rig.sample("s2moe_requests_total", **labels)


def assert_ends_with_an_error(reply: httpx.Response) -> None:
    assert reply.status_code == 200
    events = events_of(reply.text)
    assert "secret" not in reply.text
    assert "[DONE]" not in events
    contents: list[Any] = [json.loads(each)["choices"][0]["delta"].get("content") for each in events[:-1]]
    assert contents == [None, "a"]
    assert json.loads(events[-1])["error"]["code"] == "internal_error"


@pytest.mark.parametrize("direct", [True, False])
async def test_stream_ends_with_an_error_event_and_the_request_is_stopped(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, fed_by: list[str], direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(GenerationStream, "is_free", property(lambda _: False))
    engine = SocketEngine(slow_letters)
    rig = await start_server(engine)
    assert_ends_with_an_error(await rig.post(chat("x", stream=True)))
    # the engine's events are handled in the task that runs the request
    assert [name == engine.requests[0].request_id for name in fed_by] == [direct]
    assert engine.raised == []
    await engine.until_aborted("x")
    await rig.until_idle()
    assert await requests_that_ended(rig, "error") == 1
    assert await rig.sample("s2moe_request_failures_total", reason="internal") == 1
    assert await rig.sample("s2moe_request_cancellations_total", phase="decode", cause="disconnect") == 0
    monkeypatch.undo()
    assert (await rig.post(chat("y", stream=True))).text.endswith("data: [DONE]\n\n")


async def test_end_that_comes_with_the_fatal_step_counts_once(
    start_server: StartServer, fed_by: list[str]
) -> None:
    engine = SocketEngine(slow_letters)
    engine.ends_at_once = True
    rig = await start_server(engine)
    assert_ends_with_an_error(await rig.post(chat("x", stream=True)))
    await rig.until_idle()
    assert fed_by
    assert [await requests_that_ended(rig, finish) for finish in ("error", "stop", "cancelled")] == [1, 0, 0]


def broken(*_: object, **__: object) -> bytes:
    raise ValueError("secret detail")


async def assert_failed_once(rig: ServerRig, *, stream: bool) -> None:
    await rig.until_idle()
    ends = [await requests_that_ended(rig, end, stream=stream) for end in ("error", "stop", "cancelled")]
    assert ends == [1, 0, 0]
    assert await rig.sample("s2moe_request_failures_total", reason="internal") == 1
    phases = ("queued", "prefill", "decode")
    for phase in phases:
        assert await rig.sample("s2moe_request_cancellations_total", phase=phase, cause="disconnect") == 0


@pytest.mark.parametrize("method", ["finish_choice", "finish"])
async def test_stream_whose_end_cannot_be_encoded_ends_with_an_error_event(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(ChatChunkEncoder, method, broken)
    rig = await start_server(FakeEngine(slow_letters))
    reply = await rig.post(chat("x", stream=True))
    assert "secret" not in reply.text
    assert json.loads(events_of(reply.text)[-1])["error"]["code"] == "internal_error"
    await assert_failed_once(rig, stream=True)


async def test_end_that_cannot_be_encoded_is_a_failure_even_when_the_engine_was_through(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatChunkEncoder, "finish_choice", broken)
    rig = await start_server(FakeEngine(hello))  # all at once
    reply = await rig.post(chat("x", stream=True))
    assert json.loads(events_of(reply.text)[-1])["error"]["code"] == "internal_error"
    await rig.until_idle()
    assert sum([await requests_that_ended(rig, finish) for finish in ("error", "stop")]) == 1
    assert await rig.sample("s2moe_request_failures_total", reason="internal") == 1


@pytest.mark.parametrize("method", ["__init__", "start"])
async def test_stream_without_a_working_encoder_ends_with_a_plain_error_event(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(ChatChunkEncoder, method, broken)
    if method == "start":
        monkeypatch.setattr(ChatChunkEncoder, "fail", broken)
    rig = await start_server(FakeEngine(slow_letters))
    reply = await rig.post(chat("x", stream=True))
    assert reply.status_code == 200
    assert "secret" not in reply.text
    kind, data = reply.text.splitlines()[:2]
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert data == reply.text.strip().splitlines()[-1]
    await rig.engine.until_aborted("x")
    await assert_failed_once(rig, stream=True)
    monkeypatch.undo()
    assert (await rig.post(chat("y", stream=True))).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("method", ["feed", "finish_choice", "finish"])
async def test_whole_answer_that_cannot_be_built_is_a_500_and_counts_as_failed(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(ChatCompletionBuilder, method, broken)
    rig = await start_server(FakeEngine(slow_letters))
    reply = await rig.post(chat("x"))
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert reply.json()["error"]["code"] == "internal_error"
    if method == "feed":
        await rig.engine.until_aborted("x")
    await assert_failed_once(rig, stream=False)
    monkeypatch.undo()
    assert (await rig.post(chat("y"))).status_code == 200
