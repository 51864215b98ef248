"""Ending the requests at shutdown: let them finish, or cut them with an error."""

from __future__ import annotations

import asyncio
import json

from fake_engine import FakeEngine, endless, endless_prefill, finished, started, step
from server_rig import StartServer, chat, events_of
from test_server_errors import assert_error

from s2moe.server.engine_client import EngineState
from s2moe.server.serve import shut_down_requests


async def test_running_request_may_finish_within_the_timeout(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: [started(r), step(r, "a"), 0.3, finished(r)]))
    running = asyncio.create_task(rig.post(chat("x", stream=True)))
    await rig.engine.until_running("x")
    await asyncio.wait_for(shut_down_requests(rig.admission, 20), 10)
    assert events_of((await running).text)[-1] == "[DONE]"


async def test_running_stream_is_cut_with_an_error_event_after_the_timeout(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless))
    running = asyncio.create_task(rig.post(chat("x", stream=True)))
    await rig.engine.until_running("x")
    await asyncio.wait_for(shut_down_requests(rig.admission, 0.1), 10)
    events = events_of((await running).text)
    assert json.loads(events[-1])["error"]["code"] == "shutdown"
    assert "[DONE]" not in events
    assert await rig.sample("s2moe_request_cancellations_total", phase="decode", cause="shutdown") == 1


async def test_running_whole_request_is_cut_with_a_500(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless_prefill))
    running = asyncio.create_task(rig.post(chat("x")))
    await rig.engine.until_running("x")
    await asyncio.wait_for(shut_down_requests(rig.admission, 0), 10)
    assert_error(await running, 500, "server_error", "shutdown")


async def test_request_that_waits_for_the_restart_is_told_at_once(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.RESTARTING))
    replies = [asyncio.create_task(rig.post(chat(name))) for name in ("a", "b")]
    await rig.until_waiting(2)
    await asyncio.wait_for(shut_down_requests(rig.admission, 20), 5)
    for reply in await asyncio.gather(*replies):
        assert_error(reply, 503, "unavailable_error", "draining")


async def test_nothing_to_wait_for_returns_at_once(start_server: StartServer) -> None:
    rig = await start_server()
    await asyncio.wait_for(shut_down_requests(rig.admission, 600), 5)
