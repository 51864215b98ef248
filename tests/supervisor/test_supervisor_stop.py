"""The ways to stop, from every state, without a process left behind."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from contextlib import aclosing

import pytest
from supervisor_rig import MakeRig, Rig, generate, gone

from s2moe.server.engine_client import EngineDiedError, EngineState, EngineUnavailableError
from s2moe.server.restart_policy import RestartLimits


async def test_shutdown_ends_a_willing_engine_at_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "s2moe")
    pid, begin = rig.pid, time.monotonic()
    await rig.supervisor.stop(10)
    assert time.monotonic() - begin < 4
    assert gone(pid)
    assert "got Shutdown" in caplog.messages
    assert "engine stopped with code 0" in caplog.messages
    assert rig.supervisor.state is EngineState.DEAD
    assert rig.supervisor.engine_pid is None
    assert not rig.supervisor.gave_up.is_set()
    assert rig.observer.restarts == []
    with pytest.raises(EngineUnavailableError):
        await rig.supervisor.wait_ready()


async def test_sigterm_follows_when_shutdown_is_ignored(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "s2moe")
    rig = make_rig(on_shutdown="ignore")
    await rig.supervisor.start()
    await rig.ready()
    pid, begin = rig.pid, time.monotonic()
    await rig.supervisor.stop(1)
    assert time.monotonic() - begin >= 0.5
    assert gone(pid)
    assert "got Shutdown" in caplog.messages
    assert f"engine stopped with code {-signal.SIGTERM}" in caplog.messages


async def test_sigkill_follows_when_sigterm_is_ignored(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "s2moe")
    rig = make_rig(on_shutdown="ignore-sigterm-too")
    await rig.supervisor.start()
    await rig.ready()
    pid, begin = rig.pid, time.monotonic()
    await rig.supervisor.stop(1)
    assert 1 <= time.monotonic() - begin < 4
    assert gone(pid)
    assert "ignored SIGTERM" in caplog.messages
    assert f"engine stopped with code {-signal.SIGKILL}" in caplog.messages


async def test_stop_without_patience_kills_and_blames_nobody(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(on_shutdown="ignore-sigterm-too")
    await rig.supervisor.start()
    await rig.ready()
    pid = rig.pid
    await rig.supervisor.stop(0)
    assert gone(pid)
    assert not [line for line in caplog.messages if "ignored" in line]


async def test_stop_ends_a_running_request_with_an_error(rig: Rig) -> None:
    async with aclosing(generate(rig.supervisor, rig.request("started", "forever"))) as stream:
        await anext(stream)
        stopping = asyncio.create_task(rig.supervisor.stop(2))
        with pytest.raises(EngineDiedError, match="stopped before the answer was complete"):
            await anext(stream)
        await stopping
    assert rig.observer.restarts == []


async def test_stop_wakes_waiters(rig: Rig) -> None:
    async with aclosing(generate(rig.supervisor, rig.request("started", "forever"))) as stream:
        await anext(stream)
        waiter = asyncio.create_task(rig.supervisor.wait_ready())
        await asyncio.sleep(0)
        stopping = asyncio.create_task(rig.supervisor.stop(2))
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await waiter
        await stopping


async def test_stop_during_the_backoff_does_not_wait_for_its_end(make_rig: MakeRig) -> None:
    limits = RestartLimits(first_backoff_seconds=60, max_backoff_seconds=60)
    rig = make_rig(starts="crash", limits=limits)
    await rig.supervisor.start()
    await rig.observer.until(lambda: rig.observer.restarts == ["crash"])
    begin = time.monotonic()
    await rig.supervisor.stop(20)
    assert time.monotonic() - begin < 5
    assert rig.n_starts == 1


async def test_stop_right_after_start_leaves_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.supervisor.start()
    await rig.supervisor.stop(4)
    assert rig.supervisor.state is EngineState.DEAD
    assert rig.supervisor.engine_pid is None


async def test_stop_during_the_load(make_rig: MakeRig) -> None:
    rig = make_rig(starts="mute-load")
    await rig.supervisor.start()
    await rig.observer.until(lambda: rig.supervisor.state is EngineState.LOADING)
    pid = rig.pid
    await rig.supervisor.stop(4)
    assert gone(pid)


async def test_stop_before_start_and_twice_is_harmless(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.supervisor.stop(1)
    await rig.supervisor.stop(1)
    assert rig.supervisor.state is EngineState.DEAD


async def test_concurrent_stops_both_return(rig: Rig) -> None:
    pid = rig.pid
    await asyncio.gather(rig.supervisor.stop(4), rig.supervisor.stop(4))
    assert gone(pid)


async def test_a_cancelled_stop_kills_the_engine(make_rig: MakeRig) -> None:
    rig = make_rig(on_shutdown="ignore-sigterm-too")
    await rig.supervisor.start()
    await rig.ready()
    pid = rig.pid
    task = asyncio.create_task(rig.supervisor.stop(60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        await rig.supervisor.stop(60)
    assert gone(pid)


async def test_an_unanswered_abort_does_not_hold_up_stop(rig: Rig) -> None:
    pid = rig.pid
    stream = generate(rig.supervisor, rig.request("started", "forever"))
    await anext(stream)
    closing = asyncio.create_task(stream.aclose())
    await asyncio.sleep(0)
    begin = time.monotonic()
    await rig.supervisor.stop(2)
    await closing
    assert time.monotonic() - begin < 5
    assert gone(pid)
