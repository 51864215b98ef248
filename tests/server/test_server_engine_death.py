"""The engine process dies; the server does not."""

from __future__ import annotations

import asyncio
import json

from fake_engine import Action, FakeEngine, Generate, hello, last_text, started, step
from server_rig import StartServer, chat, events_of
from test_server_errors import assert_error

from s2moe.server.engine_client import EngineDiedError, EngineState

GONE = "The engine process ended unexpectedly."


class DiesInDecode:
    """Answers a "victim" with the engine's death, as soon as `now` is set."""

    def __init__(self) -> None:
        self.now = asyncio.Event()

    def __call__(self, request: Generate) -> list[Action]:
        if last_text(request) != "victim":
            return list(hello(request))
        died = EngineDiedError(GONE, generation_began=True)
        return [started(request), step(request, "a"), self.now, died]


def dies_in_prefill(request: Generate) -> list[Action]:
    return [started(request), EngineDiedError(GONE, generation_began=False)]


async def test_death_in_a_stream_is_an_error_event_without_done(start_server: StartServer) -> None:
    death = DiesInDecode()
    rig = await start_server(FakeEngine(death))
    victim = asyncio.create_task(rig.post(chat("victim", stream=True)))
    await rig.engine.until_running("victim")
    queued = asyncio.create_task(rig.post(chat("queued", stream=True)))
    await rig.until_waiting(1)
    death.now.set()
    events = events_of((await victim).text)
    assert json.loads(events[-1])["error"] == {
        "message": GONE,
        "type": "server_error",
        "param": None,
        "code": "engine_died",
    }
    assert "[DONE]" not in events
    assert '"content":"a"' in events[-2]
    assert events_of((await queued).text)[-1] == "[DONE]"
    assert (await rig.post(chat("next"))).status_code == 200
    assert await rig.sample("s2moe_request_failures_total", reason="engine_died") == 1


async def test_death_after_the_first_token_discourages_a_retry(start_server: StartServer) -> None:
    death = DiesInDecode()
    death.now.set()
    rig = await start_server(FakeEngine(death))
    reply = await rig.post(chat("victim"))
    assert_error(reply, 500, "server_error", "engine_died")
    assert reply.headers["x-should-retry"] == "false"


async def test_death_before_started_is_http_500_that_may_be_retried(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: [EngineDiedError(GONE, generation_began=False)]))
    for stream in (False, True):
        reply = await rig.post(chat(stream=stream))
        assert_error(reply, 500, "server_error", "engine_died")
        assert "x-should-retry" not in reply.headers


async def test_death_in_prefill_of_a_stream_is_an_error_event(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(dies_in_prefill))
    reply = await rig.post(chat(stream=True))
    assert json.loads(events_of(reply.text)[-1])["error"]["code"] == "engine_died"
    assert_error(await rig.post(chat()), 500, "server_error", "engine_died")


async def test_queue_survives_the_restart(start_server: StartServer) -> None:
    death = DiesInDecode()
    engine = FakeEngine(death)
    rig = await start_server(engine)
    victim = asyncio.create_task(rig.post(chat("victim")))
    await engine.until_running("victim")
    queued = [asyncio.create_task(rig.post(chat(f"q{i}"))) for i in range(3)]
    await rig.until_waiting(3)
    engine.set_state(EngineState.RESTARTING)
    death.now.set()
    assert (await victim).status_code == 500
    late = asyncio.create_task(rig.post(chat("late")))
    await rig.until_waiting(4)
    engine.set_state(EngineState.READY)
    assert {reply.status_code for reply in await asyncio.gather(*queued, late)} == {200}
    assert [last_text(request) for request in engine.requests] == ["victim", "q0", "q1", "q2", "late"]


async def test_health_and_metrics_answer_without_an_engine(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.DEAD, model=None))
    assert (await rig.http.get("/health")).status_code == 503
    assert (await rig.http.get("/metrics")).status_code == 200
    assert (await rig.http.get("/v1/models")).status_code == 200
    assert (await rig.http.get("/version")).json()["system_fingerprint"] is None
