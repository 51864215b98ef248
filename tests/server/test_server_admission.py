"""The queue in front of the engine."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import (
    MODEL,
    Action,
    FakeEngine,
    Generate,
    endless,
    endless_prefill,
    finished,
    hello,
    last_text,
    started,
    step,
    until,
)
from server_rig import StartServer, chat
from test_server_errors import assert_error

from s2moe.server import admission
from s2moe.server.engine_client import EngineState
from s2moe.server.service_time import ServiceTime


def first_one_endless(request: Generate) -> list[Action]:
    """The request `first` runs until it is cancelled, others give two tokens."""
    return list(endless(request) if last_text(request) == "first" else hello(request))


async def test_requests_run_one_at_a_time_in_the_order_of_arrival(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: [started(r), 0.02, step(r, "x"), finished(r)]))
    names = [f"r{i}" for i in range(10)]
    replies = []
    for index, name in enumerate(names):
        replies.append(asyncio.create_task(rig.post(chat(name, stream=index % 2 == 0))))
        if index == 0:
            await rig.engine.until_running("r0")
        else:
            await until(lambda: rig.admission.n_waiting + len(rig.engine.requests) > index)  # noqa: B023
    assert {reply.status_code for reply in await asyncio.gather(*replies)} == {200}
    assert [last_text(request) for request in rig.engine.requests] == names
    assert rig.engine.overlaps == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_is_429_with_retry_after(start_server: StartServer, stream: bool) -> None:
    rig = await start_server(FakeEngine(first_one_endless), queue_size=2)
    first = await rig.connect(chat("first", stream=True))
    await rig.engine.until_running("first")
    waiting = [asyncio.create_task(rig.post(chat(f"w{i}"))) for i in range(2)]
    await rig.until_waiting(2)
    reply = await rig.post(chat("too many", stream=stream))
    assert_error(reply, 429, "rate_limit_error", "queue_full")
    assert int(reply.headers["retry-after"]) >= 1
    assert await rig.sample("s2moe_requests_rejected_total", reason="queue_full") == 1
    assert await rig.sample("s2moe_requests_waiting") == 2
    assert await rig.sample("s2moe_requests_running") == 1
    first.leave()
    assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [200, 200]
    assert (await rig.post(chat("later"))).status_code == 200


async def test_queue_size_zero_lets_only_the_running_request_in(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(first_one_endless), queue_size=0)
    first = await rig.connect(chat("first", stream=True))
    await rig.engine.until_running("first")
    assert (await rig.post(chat())).status_code == 429
    first.leave()
    await rig.until_idle()
    assert (await rig.post(chat())).status_code == 200


async def test_client_that_leaves_makes_room_at_once_without_a_queue(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(first_one_endless, abort_seconds=0.5), queue_size=0)
    first = await rig.connect(chat("first", stream=True))
    await rig.engine.until_running("first")
    first.leave()
    await rig.engine.until_aborted("first")
    assert rig.engine.running == "first"
    assert (await rig.post(chat())).status_code == 200
    assert rig.engine.overlaps == 0


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_seconds = 1000.0

    def monotonic(self) -> float:
        return self.now_seconds


async def test_retry_after_is_what_is_left_of_the_measured_service_time(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(admission, "time", clock)

    def takes(request: Generate) -> list[Action]:
        """As many seconds as its text says."""
        if last_text(request) == "first":
            return list(endless(request))
        clock.now_seconds += float(last_text(request))
        return list(hello(request))

    async def retry_after() -> str:
        reply = await rig.post(chat("0"))
        text = assert_error(reply, 429, "rate_limit_error", "queue_full")
        assert f"about {reply.headers['retry-after']} s" in text
        return reply.headers["retry-after"]

    rig = await start_server(FakeEngine(takes), queue_size=0)
    assert (await rig.post(chat("3"))).status_code == 200
    await rig.until_idle()
    first = await rig.connect(chat("first", stream=True))
    await rig.engine.until_running("first")
    assert await retry_after() == "3"
    clock.now_seconds += 1
    assert await retry_after() == "2"
    clock.now_seconds += 10
    assert await retry_after() == "1"
    first.leave()
    await rig.until_idle()
    assert (await rig.post(chat("1000"))).status_code == 200
    await rig.until_idle()
    await rig.connect(chat("first", stream=True))
    await rig.engine.until_running("first")
    assert await retry_after() == "120"


@pytest.mark.parametrize("end", ["client leaves", "timeout", "failure"])
async def test_service_time_is_measured_however_a_request_ends(start_server: StartServer, end: str) -> None:
    script = {"client leaves": endless, "timeout": endless_prefill, "failure": lambda _: [ValueError("bug")]}
    rig = await start_server(FakeEngine(script[end]), request_timeout=0.2)
    guess = rig.admission.retry_after_seconds()
    if end == "client leaves":
        first = await rig.connect(chat("first", stream=True))
        await rig.engine.until_running("first")
        first.leave()
    else:
        assert (await rig.post(chat("first"))).status_code == {"timeout": 504, "failure": 500}[end]
    await rig.until_idle()
    assert guess > 1
    assert rig.admission.retry_after_seconds() == 1


def test_service_time_follows_the_latest_and_is_within_limits() -> None:
    service = ServiceTime(5)
    assert service.retry_after_seconds() == 5
    service.measure(3)
    assert service.retry_after_seconds() == 3
    assert [service.retry_after_seconds(elapsed) for elapsed in (0.5, 1, 2.9, 60)] == [3, 2, 1, 1]
    service.measure(13)
    assert 3 < service.retry_after_seconds() < 8
    for _ in range(30):
        service.measure(13)
    assert service.retry_after_seconds() == 13
    service.measure(1e6)
    assert service.retry_after_seconds() == 120


async def test_loading_is_503_and_not_queued(start_server: StartServer) -> None:
    engine = FakeEngine(state=EngineState.LOADING, state_detail="loading model 42 %", model=None)
    rig = await start_server(engine)
    for stream in (False, True):
        reply = await rig.post(chat(stream=stream))
        text = assert_error(reply, 503, "unavailable_error", "loading")
        assert "42 %" in text
        assert int(reply.headers["retry-after"]) >= 1
    assert await rig.sample("s2moe_requests_rejected_total", reason="loading") == 2
    engine.model = MODEL
    engine.set_state(EngineState.READY)
    assert (await rig.post(chat())).status_code == 200


async def test_dead_engine_is_503(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.DEAD, state_detail="5 crashes"))
    reply = await rig.post(chat())
    assert "5 crashes" in assert_error(reply, 503, "unavailable_error", "engine_dead")
    assert "retry-after" in reply.headers


async def test_requests_are_queued_while_the_engine_restarts(start_server: StartServer) -> None:
    engine = FakeEngine(state=EngineState.RESTARTING, state_detail="backoff")
    rig = await start_server(engine, queue_size=2)
    replies = [asyncio.create_task(rig.post(chat(name))) for name in ("a", "b")]
    await rig.until_waiting(2)
    assert (await rig.post(chat("c"))).status_code == 429
    assert await rig.sample("s2moe_requests_running") == 0
    engine.set_state(EngineState.READY)
    assert [reply.status_code for reply in await asyncio.gather(*replies)] == [200, 200]


async def test_waiting_requests_are_told_when_the_engine_is_given_up(start_server: StartServer) -> None:
    engine = FakeEngine(state=EngineState.RESTARTING)
    rig = await start_server(engine)
    replies = [asyncio.create_task(rig.post(chat(name, stream=name == "a"))) for name in ("a", "b")]
    await rig.until_waiting(2)
    engine.set_state(EngineState.DEAD)
    for reply in await asyncio.gather(*replies):
        assert_error(reply, 503, "unavailable_error", "engine_dead")


async def test_engine_that_goes_just_before_the_request_is_tried_again(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(unavailable_times=2))
    assert (await rig.post(chat())).status_code == 200


async def test_engine_that_is_never_there_ends_in_503(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(unavailable_times=100))
    assert_error(await rig.post(chat()), 503, "unavailable_error", "engine_restarting")
    assert rig.engine.unavailable_times > 90


async def test_draining_turns_new_and_waiting_requests_away_and_lets_the_running_one_finish(
    start_server: StartServer,
) -> None:
    go_on = asyncio.Event()
    rig = await start_server(FakeEngine(lambda r: [started(r), step(r, "x"), go_on, finished(r)]))
    running = asyncio.create_task(rig.post(chat("running", stream=True)))
    await rig.engine.until_running("running")
    waiting = asyncio.create_task(rig.post(chat("waiting")))
    await rig.until_waiting(1)
    rig.admission.drain()
    for reply in (await waiting, await rig.post(chat("new"))):
        assert_error(reply, 503, "unavailable_error", "draining")
        assert "retry-after" in reply.headers
    go_on.set()
    assert (await running).text.endswith("data: [DONE]\n\n")
    await rig.until_idle()
