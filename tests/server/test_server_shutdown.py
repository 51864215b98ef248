"""Ending the requests at shutdown: let them finish, or cut them with an error."""

from __future__ import annotations

import asyncio
import json

from fake_engine import FakeEngine, endless, endless_prefill, finished, started, step, until
from server_rig import StartServer, chat, events_of
from test_server_embeddings import EMBEDDER, EMBEDDINGS, embed
from test_server_errors import assert_error

from s2moe.engine.messages import Query, QueryReply
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


async def test_second_signal_cuts_the_running_stream_with_the_same_error(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(endless))
    running = asyncio.create_task(rig.post(chat("x", stream=True)))
    await rig.engine.until_running("x")
    ending = asyncio.create_task(shut_down_requests(rig.admission, 600))
    await asyncio.sleep(0.1)
    assert not ending.done()
    ending.cancel()  # as serve does at the second one
    assert json.loads(events_of((await running).text)[-1])["error"]["code"] == "shutdown"
    assert ending.cancelled()


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


class SlowEmbedder(FakeEngine):
    """Gives vectors when it is told to."""

    def __init__(self) -> None:
        super().__init__(model=EMBEDDER, answer=embed)
        self.go_on = asyncio.Event()
        self.n_asked = 0

    async def ask(self, query: Query) -> QueryReply:
        self.n_asked += 1
        await self.go_on.wait()
        return await super().ask(query)


async def test_running_embeddings_may_finish_within_the_timeout(start_server: StartServer) -> None:
    engine = SlowEmbedder()
    rig = await start_server(engine)
    running = asyncio.create_task(rig.http.post(EMBEDDINGS, json={"input": ["a"] * 40}))
    await until(lambda: engine.n_asked == 1)
    waiting = asyncio.create_task(rig.http.post(EMBEDDINGS, json={"input": "b"}))
    await asyncio.sleep(0.05)
    ending = asyncio.create_task(shut_down_requests(rig.admission, 20))
    assert_error(await asyncio.wait_for(waiting, 5), 503, "unavailable_error", "draining")
    assert not ending.done()
    engine.go_on.set()
    reply = await running
    assert reply.status_code == 200
    assert len(reply.json()["data"]) == 40
    await asyncio.wait_for(ending, 5)
    assert engine.n_asked == 2  # of up to 32 inputs each


async def test_running_embeddings_are_cut_after_the_timeout(start_server: StartServer) -> None:
    engine = SlowEmbedder()
    rig = await start_server(engine)
    running = asyncio.create_task(rig.http.post(EMBEDDINGS, json={"input": "a"}))
    await until(lambda: engine.n_asked == 1)
    await asyncio.wait_for(shut_down_requests(rig.admission, 0.1), 5)
    assert_error(await running, 500, "server_error", "shutdown")
    new = await rig.http.post(EMBEDDINGS, json={"input": "b"})
    assert_error(new, 503, "unavailable_error", "draining")
    assert engine.n_asked == 1
