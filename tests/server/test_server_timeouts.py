"""--request-timeout and --queue-timeout."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from fake_engine import (
    Action,
    FakeEngine,
    Generate,
    endless,
    endless_prefill,
    finished,
    last_text,
    started,
    step,
)
from server_rig import StartServer, chat, events_of
from test_server_errors import assert_error

from s2moe.server.engine_client import EngineState


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_takes_too_long_before_its_first_token_is_504(
    start_server: StartServer, stream: bool
) -> None:
    rig = await start_server(FakeEngine(lambda r: [60.0]), request_timeout=0.2)
    reply = await rig.post(chat("slow", stream=stream))
    text = assert_error(reply, 504, "server_error", "timeout")
    assert "--request-timeout" in text
    assert reply.headers["x-should-retry"] == "false"
    await rig.engine.until_aborted("slow")
    await rig.until_idle()
    assert await rig.sample("s2moe_request_failures_total", reason="timeout") == 1
    assert await rig.sample("s2moe_request_cancellations_total", phase="prefill", cause="timeout") == 1
    labels = {"model": "demo", "api": "chat", "stream": str(stream).lower(), "finish": "error"}
    assert await rig.sample("s2moe_requests_total", **labels) == 1


async def test_stream_that_takes_too_long_ends_with_an_error_event(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless), request_timeout=0.3)
    reply = await rig.post(chat(stream=True))
    events = events_of(reply.text)
    assert reply.status_code == 200
    assert json.loads(events[1])["choices"][0]["delta"] == {"content": "x"}
    assert json.loads(events[-1])["error"]["code"] == "timeout"
    assert "[DONE]" not in events
    assert await rig.sample("s2moe_request_cancellations_total", phase="decode", cause="timeout") == 1


async def test_time_counts_over_all_choices(start_server: StartServer) -> None:
    def fifth_of_a_second(request: Generate) -> list[Action]:
        return [started(request), step(request, "a"), 0.2, finished(request)]

    rig = await start_server(FakeEngine(fifth_of_a_second), request_timeout=0.5)
    assert (await rig.post(chat(n=1))).status_code == 200
    assert_error(await rig.post(chat(n=5)), 504, "server_error", "timeout")
    assert 2 <= len(rig.engine.requests) - 1 < 5


async def test_wait_in_the_queue_does_not_count(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(lambda r: [started(r), step(r, "a"), 0.3, finished(r)]), request_timeout=0.5
    )
    replies = await asyncio.gather(*(rig.post(chat(str(i))) for i in range(3)))
    assert [reply.status_code for reply in replies] == [200] * 3


async def test_next_request_runs_after_the_timeout_of_another(start_server: StartServer) -> None:
    def slow(request: Generate) -> list[Action]:
        if last_text(request) == "slow":
            return list(endless_prefill(request))
        return [started(request), step(request, "a"), finished(request)]

    rig = await start_server(FakeEngine(slow, abort_seconds=0.1), request_timeout=0.2)
    first = asyncio.create_task(rig.post(chat("slow")))
    await rig.engine.until_running("slow")
    assert (await rig.post(chat("quick"))).status_code == 200
    assert (await first).status_code == 504
    assert rig.engine.overlaps == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_got_a_504_may_ask_again_at_once_without_a_queue(
    start_server: StartServer, stream: bool
) -> None:
    """The engine takes a while to let go of the first request."""

    def slow_first(request: Generate) -> list[Action]:
        if last_text(request) == "slow":
            return [60.0]
        return [started(request), step(request, "a"), finished(request)]

    rig = await start_server(FakeEngine(slow_first, abort_seconds=0.5), request_timeout=0.2, queue_size=0)
    assert (await rig.post(chat("slow", stream=stream))).status_code == 504
    assert rig.engine.running == "slow"
    again = asyncio.create_task(rig.post(chat("again", stream=stream)))
    await rig.until_waiting(1)
    # one request takes the place of the other, and no more
    assert_error(await rig.post(chat("third")), 429, "rate_limit_error", "queue_full")
    assert (await again).status_code == 200
    assert rig.engine.overlaps == 0
    await rig.until_idle()
    running = asyncio.create_task(rig.post(chat("slow")))
    await rig.engine.until_running("slow")
    assert_error(await rig.post(chat("behind it")), 429, "rate_limit_error", "queue_full")
    assert (await running).status_code == 504


async def test_no_timeout_unless_set(start_server: StartServer) -> None:
    rig = await start_server()
    assert (rig.settings.request_timeout, rig.settings.queue_timeout) == (0, 0)
    assert (await rig.post(chat())).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_wait_in_the_queue_that_is_too_long_is_429(start_server: StartServer, stream: bool) -> None:
    rig = await start_server(FakeEngine(endless), queue_timeout=0.2)
    first = await rig.connect(chat("first", stream=True))
    await rig.engine.until_running("first")
    began = time.monotonic()
    reply = await rig.post(chat("late", stream=stream))
    assert 0.19 <= time.monotonic() - began < 3
    text = assert_error(reply, 429, "rate_limit_error", "queue_timeout")
    assert "--queue-timeout" in text
    assert int(reply.headers["retry-after"]) >= 1
    assert await rig.sample("s2moe_requests_rejected_total", reason="queue_timeout") == 1
    assert await rig.sample("s2moe_requests_waiting") == 0
    assert rig.engine.running == "first"
    first.leave()
    await rig.until_idle()


async def test_wait_for_a_restart_that_is_too_long_is_429_and_frees_the_slot(
    start_server: StartServer,
) -> None:
    rig = await start_server(FakeEngine(state=EngineState.RESTARTING), queue_timeout=0.2)
    assert_error(await rig.post(chat()), 429, "rate_limit_error", "queue_timeout")
    rig.engine.set_state(EngineState.READY)
    assert (await rig.post(chat())).status_code == 200


async def test_place_that_is_free_in_time_is_taken(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(lambda r: [started(r), step(r, "a"), 0.1, finished(r)]), queue_timeout=5
    )
    replies = await asyncio.gather(*(rig.post(chat(str(i))) for i in range(3)))
    assert [reply.status_code for reply in replies] == [200] * 3
