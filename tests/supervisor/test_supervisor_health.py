"""Busy, hung and held up told apart."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from supervisor_rig import FAST, MakeRig, Rig

from s2moe.engine.messages import Finished
from s2moe.server.engine_client import EngineDiedError


async def test_pongs_keep_the_heartbeat_young(rig: Rig) -> None:
    await rig.observer.until(lambda: 0.0 < rig.supervisor.heartbeat_age_seconds < 0.5)
    await rig.run("busy:0.6", "finish")
    assert rig.supervisor.heartbeat_age_seconds < 0.5


async def test_an_engine_that_stops_ponging_is_killed_as_hung(rig: Rig) -> None:
    begin = time.monotonic()
    with pytest.raises(EngineDiedError, match="stopped responding"):
        await rig.run("started", "mute", "forever")
    assert time.monotonic() - begin >= FAST.hang_timeout_seconds * 0.8
    await rig.ready()
    assert rig.observer.restarts == ["hang"]
    assert "answered no ping" in rig.observer.restart_details[0]
    assert isinstance((await rig.run("finish"))[-1], Finished)


async def test_a_hang_during_the_load_is_seen_too(make_rig: MakeRig) -> None:
    rig = make_rig(starts="mute-load,normal", times=replace(FAST, hang_timeout_seconds=0.4))
    await rig.supervisor.start()
    await rig.ready()
    assert rig.observer.restarts == ["hang"]


async def test_an_engine_that_never_says_hello_is_killed(make_rig: MakeRig) -> None:
    rig = make_rig(starts="silent,normal", times=replace(FAST, hello_timeout_seconds=1.0))
    await rig.supervisor.start()
    await rig.ready()
    assert rig.observer.restarts[0] == "hang"
    assert "did not say hello" in rig.observer.restart_details[0]


async def test_a_long_prefill_that_pongs_is_busy_and_not_hung(make_rig: MakeRig) -> None:
    rig = make_rig(times=replace(FAST, hang_timeout_seconds=0.5))
    await rig.supervisor.start()
    await rig.ready()
    events = await rig.run("started", "busy:1.5", "step:x", "finish")
    assert isinstance(events[-1], Finished)
    assert rig.observer.restarts == []


async def test_a_step_beyond_the_step_timeout_is_hung_although_pongs_arrive(rig: Rig) -> None:
    with pytest.raises(EngineDiedError, match="stopped responding"):
        await rig.run("started", "stuck", "forever")
    await rig.ready()
    assert rig.observer.restarts == ["hang"]
    assert "no step ended for 600 s" in rig.observer.restart_details[0]


async def test_a_pause_of_the_front_end_itself_is_not_the_engines_hang(make_rig: MakeRig) -> None:
    rig = make_rig(times=replace(FAST, hang_timeout_seconds=0.5))
    await rig.supervisor.start()
    await rig.ready()
    time.sleep(1.0)  # noqa: ASYNC251 - blocking the loop is what is tested
    n_messages = len(rig.observer.n_bytes["from_engine"])
    await rig.observer.until(lambda: len(rig.observer.n_bytes["from_engine"]) >= n_messages + 3)
    await asyncio.sleep(0)
    assert rig.observer.restarts == []
    assert isinstance((await rig.run("finish"))[-1], Finished)
