"""Several answers to one request, and the progress of its prompt."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from fake_engine import Action, FakeEngine, Generate, endless, endless_prefill, finished, started, step
from scripted_answers import answer, answer_with_calls
from server_rig import StartServer, chat, chunks_of, events_of
from test_server_chat_tools import LOOK
from test_server_errors import assert_error

from s2moe.engine.messages import Failed, PrefillProgress, Step
from s2moe.server.stream.chat_chunks import ChatChunkEncoder

USAGE = {"stream_options": {"include_usage": True}}


def numbered(request: Generate, index: int) -> list[Action]:
    """The first answer evaluates the prompt, the others find it in the cache."""
    return [
        started(request, cached=0 if index == 0 else 9),
        step(request, f"answer {index}", n_tokens=2),
        finished(
            request, "length" if index == 1 else "stop", cached=0 if index == 0 else 9, tokens=index + 2
        ),
    ]


def counting() -> FakeEngine:
    indices = itertools.count()
    return FakeEngine(lambda request: numbered(request, next(indices)))


async def test_choices_are_answered_one_after_the_other(start_server: StartServer) -> None:
    rig = await start_server(counting())
    body = (await rig.post(chat(n=3, seed=2**32 - 2))).json()
    assert [
        (choice["index"], choice["message"]["content"], choice["finish_reason"]) for choice in body["choices"]
    ] == [(0, "answer 0", "stop"), (1, "answer 1", "length"), (2, "answer 2", "stop")]
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 9,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["timings"]["predicted_n"] == 9
    assert [request.sampling.seed for request in rig.engine.requests] == [2**32 - 2, 2**32 - 1, 0]
    assert len({request.request_id for request in rig.engine.requests}) == 3
    assert rig.engine.overlaps == 0


async def test_choices_without_a_seed_stay_random(start_server: StartServer) -> None:
    rig = await start_server(counting())
    await rig.post(chat(n=2))
    assert [request.sampling.seed for request in rig.engine.requests] == [None, None]


async def test_choices_are_streamed_with_one_role_and_one_end_each(start_server: StartServer) -> None:
    rig = await start_server(counting())
    text = (await rig.post(chat(n=3, stream=True, **USAGE))).text
    *chunks, last = chunks_of(text)
    seen = [
        (choice["index"], choice["delta"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    role = {"role": "assistant", "content": None}
    assert seen == [
        each
        for index, reason in enumerate(("stop", "length", "stop"))
        for each in (
            (index, role, None),
            (index, {"content": f"answer {index}"}, None),
            (index, {}, reason),
        )
    ]
    assert [chunk["usage"] for chunk in chunks] == [None] * 9
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (10, 9)
    assert events_of(text)[-1] == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_timings_come_once_without_usage(start_server: StartServer) -> None:
    rig = await start_server(counting())
    chunks = chunks_of((await rig.post(chat(n=2, stream=True))).text)
    assert ["timings" in chunk for chunk in chunks] == [False] * 5 + [True]
    assert chunks[-1]["timings"]["predicted_n"] == 5
    assert not any("usage" in chunk for chunk in chunks)


async def test_calls_and_reasoning_of_one_choice_do_not_leak_into_the_next(
    start_server: StartServer,
) -> None:
    def script(request: Generate) -> list[Action]:
        if len(rig.engine.requests) == 1:
            return list(answer_with_calls(request, ("look", {})))
        return list(answer(request, "text", reasoning="hm"))

    rig = await start_server(FakeEngine(script))
    first, second = (await rig.post(chat(n=2, tools=[LOOK]))).json()["choices"]
    assert "reasoning" not in first["message"]
    assert first["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert second["message"] == {
        "role": "assistant",
        "content": "text",
        "reasoning_content": "hm",
        "reasoning": "hm",
    }
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
    assert [request.own_call_ids for request in rig.engine.requests] == [False, True]


async def test_choices_wait_once_in_the_queue_and_count_as_one_request(start_server: StartServer) -> None:
    rig = await start_server(counting(), queue_size=0)
    assert (await rig.post(chat(n=3))).status_code == 200
    labels = {"model": "demo", "api": "chat", "stream": "false"}
    assert await rig.sample("s2moe_requests_total", **labels, finish="stop") == 1
    assert await rig.sample("s2moe_request_generated_tokens_count", model="demo") == 3
    assert await rig.sample("s2moe_generated_tokens_total", model="demo", kind="content") == 9


async def test_failure_of_a_later_choice_ends_the_stream_with_an_error(start_server: StartServer) -> None:
    def script(request: Generate) -> list[Action]:
        if len(rig.engine.requests) == 1:
            return numbered(request, 0)
        return [started(request), Failed(request_id=request.request_id, code="internal", message="kaput")]

    rig = await start_server(FakeEngine(script))
    events = events_of((await rig.post(chat(n=2, stream=True))).text)
    assert json.loads(events[-1])["error"]["message"] == "kaput"
    rig.engine.requests.clear()
    whole = await rig.post(chat(n=2))
    assert_error(whole, 500, "server_error", "internal_error")
    assert whole.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_client_that_leaves_in_a_later_choice_is_aborted(
    start_server: StartServer, phase: str, stream: bool
) -> None:
    def script(request: Generate) -> list[Action]:
        if len(rig.engine.requests) == 1:
            return numbered(request, 0)
        return list(endless(request) if phase == "decode" else endless_prefill(request))

    rig = await start_server(FakeEngine(script))
    leaver = await rig.connect(chat("leaver", n=3, stream=stream))
    if stream:
        await leaver.read_until(b'"index":1,"delta":' + (b'{"content":"x"}' if phase == "decode" else b"{"))
    async with asyncio.timeout(5):
        while len(rig.engine.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.03)
    leaver.leave()
    await rig.engine.until_aborted("leaver")
    await rig.until_idle()
    assert len(rig.engine.requests) == 2
    labels = {"phase": "decode", "cause": "disconnect"}
    assert await rig.sample("s2moe_request_cancellations_total", **labels) == 1
    finish = {"api": "chat", "finish": "cancelled", "stream": str(stream).lower()}
    assert await rig.sample("s2moe_requests_total", model="demo", **finish) == 1


# ── progress of the prompt ──────────────────────────────────────────────────────────────────────


def in_batches(request: Generate) -> list[Action]:
    done = [PrefillProgress(request_id=request.request_id, n_done_tokens=n) for n in (6, 10)]
    return [started(request, cached=2), *done, step(request, "a"), finished(request, cached=2)]


async def test_progress_of_the_prompt_is_sent_when_asked_for(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(in_batches))
    chunks = chunks_of((await rig.post(chat(stream=True, return_progress=True))).text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    with_progress = chunks[1:4]
    progress = [chunk["prompt_progress"] for chunk in with_progress]
    assert [each.pop("time_ms") >= 0 for each in progress] == [True] * 3
    assert progress == [{"total": 10, "cache": 2, "processed": n} for n in (2, 6, 10)]
    assert [chunk["choices"][0]["delta"] for chunk in with_progress] == [{}] * 3
    assert not any("prompt_progress" in chunk for chunk in chunks[4:])


async def test_progress_is_not_sent_unasked(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(in_batches))
    assert "prompt_progress" not in (await rig.post(chat(stream=True))).text
    assert "prompt_progress" not in (await rig.post(chat(return_progress=True))).text


def test_progress_tells_the_time_since_the_prompt_was_begun() -> None:
    now = [100.0]
    encoder = ChatChunkEncoder(
        completion_id="c",
        created=1,
        model="m",
        system_fingerprint="f",
        include_usage=True,
        return_progress=True,
        clock=lambda: now[0],
    )
    request = Generate(request_id="r")
    encoder.start()
    encoder.progress(started(request))
    now[0] += 1.25
    (chunk,) = chunks_of(encoder.progress(PrefillProgress(request_id="r", n_done_tokens=3)).decode())
    assert chunk["prompt_progress"] == {"total": 10, "cache": 0, "processed": 3, "time_ms": 1250}
    assert chunk["usage"] is None


def test_each_step_is_one_call_and_a_token_one_event() -> None:
    encoder = ChatChunkEncoder(
        completion_id="c", created=1, model="m", system_fingerprint="f", include_usage=False
    )
    encoder.start()
    events: list[Any] = chunks_of(encoder.feed(Step(request_id="r", content="x", n_tokens=3)).decode())
    assert [each["choices"][0]["delta"] for each in events] == [{"content": "x"}]
    assert encoder.feed(Step(request_id="r")) == b""
