"""Queries: replies to whom they belong, beside a request, and what becomes of them when the engine goes."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing

import pytest
from supervisor_rig import MakeRig, Rig, generate

from s2moe.engine.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Embed,
    Finished,
    QueryReply,
    Step,
    Tokenize,
    Tokenized,
    encode_frame,
)
from s2moe.server.engine_client import (
    EngineDiedError,
    EngineError,
    EngineState,
    EngineStoppingError,
    EngineUnavailableError,
    QueryError,
    TooLongForEngineError,
)
from s2moe.server.errors import to_api_error
from s2moe.server.pending_queries import PendingQueries


async def ask(rig: Rig, text: str, query_id: str = "1") -> QueryReply:
    async with asyncio.timeout(20):
        return await rig.supervisor.ask(Tokenize(query_id=query_id, text=text))


def held(rig: Rig, *query_ids: str) -> list[asyncio.Task[QueryReply]]:
    """Queries that the engine does not answer until it is told to."""
    return [asyncio.create_task(ask(rig, "hold", query_id)) for query_id in query_ids]


async def sent(rig: Rig, n_held: int) -> None:
    """Returns when so many queries of held() are on their way."""
    n_bytes = len(encode_frame(Tokenize(query_id="10", text="hold")))
    await rig.observer.until(lambda: rig.observer.n_bytes["to_engine"].count(n_bytes) == n_held)


async def test_a_query_gets_its_reply(rig: Rig) -> None:
    assert await ask(rig, "count:3") == Tokenized(query_id="1", tokens=[0, 1, 2])
    assert rig.supervisor.state is EngineState.READY


async def test_a_refused_query_raises_what_the_engine_said(rig: Rig) -> None:
    with pytest.raises(QueryError) as caught:
        await ask(rig, "fail:context_length_exceeded")
    assert caught.value.message == "failed as told"
    assert (caught.value.reply.code, caught.value.reply.param) == ("context_length_exceeded", "text")
    assert await ask(rig, "count:0") == Tokenized(query_id="1", tokens=[])


async def test_replies_find_their_queries_in_any_order(rig: Rig) -> None:
    first, second, third = held(rig, "10", "20", "30")
    await sent(rig, 3)
    assert await ask(rig, "release", "40") == Tokenized(query_id="40", tokens=[40])
    replies = await asyncio.gather(first, second, third)
    assert replies == [Tokenized(query_id=str(n), tokens=[n]) for n in (10, 20, 30)]


async def test_queries_are_answered_beside_a_request(rig: Rig) -> None:
    async with aclosing(generate(rig.supervisor, rig.request("started", "until-abort"))) as stream:
        await anext(stream)
        assert rig.supervisor.state is EngineState.BUSY
        assert await ask(rig, "count:1") == Tokenized(query_id="1", tokens=[0])
        assert rig.supervisor.state is EngineState.BUSY
    assert [type(event) for event in await rig.run("step:x", "finish")] == [Step, Finished]


async def test_giving_up_an_embedding_aborts_it(rig: Rig) -> None:
    waiting = asyncio.create_task(rig.supervisor.ask(Embed(query_id="embedding-1", texts=["hold"])))
    sent_bytes = rig.observer.n_bytes["to_engine"]
    await rig.observer.until(
        lambda: len(encode_frame(Embed(query_id="embedding-1", texts=["hold"]))) in sent_bytes
    )
    abort_bytes = len(encode_frame(Abort(request_id="embedding-1")))
    assert abort_bytes not in sent_bytes
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert abort_bytes in rig.observer.n_bytes["to_engine"]


async def test_abort_of_a_request_leaves_queries_alone(rig: Rig) -> None:
    (waiting,) = held(rig, "10")
    await sent(rig, 1)
    stream = generate(rig.supervisor, rig.request("started", "until-abort"))
    await anext(stream)
    await stream.aclose()
    assert not waiting.done()
    await ask(rig, "release", "40")
    assert await waiting == Tokenized(query_id="10", tokens=[10])


async def test_the_reply_to_a_cancelled_query_is_dropped(rig: Rig) -> None:
    cancelled, kept = held(rig, "10", "20")
    await sent(rig, 2)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await ask(rig, "release", "40")
    assert await kept == Tokenized(query_id="20", tokens=[20])
    # the id is free again
    assert await ask(rig, "count:2", "10") == Tokenized(query_id="10", tokens=[0, 1])
    assert rig.observer.restarts == []


async def test_a_reply_that_nobody_waits_for_is_no_reply_to_others(rig: Rig) -> None:
    assert await ask(rig, "reply-of:99") == Tokenized(query_id="1", tokens=[])
    assert rig.observer.restarts == []


async def test_two_queries_of_one_id_are_refused(rig: Rig) -> None:
    (waiting,) = held(rig, "10")
    await sent(rig, 1)
    with pytest.raises(RuntimeError, match="under way"):
        await ask(rig, "count:1", "10")
    await ask(rig, "release", "40")
    assert await waiting == Tokenized(query_id="10", tokens=[10])


async def test_a_query_that_is_too_long_for_the_wire_is_refused(rig: Rig) -> None:
    with pytest.raises(TooLongForEngineError, match="too long") as caught:
        await ask(rig, "x" * MAX_FRAME_BYTES)
    assert caught.value.limit_bytes == MAX_FRAME_BYTES
    assert await ask(rig, "count:1") == Tokenized(query_id="1", tokens=[0])


async def test_kill_fails_every_pending_query_and_the_engine_returns(rig: Rig) -> None:
    waiting = held(rig, "10", "20")
    await sent(rig, 2)
    os.kill(rig.pid, signal.SIGKILL)
    for each in waiting:
        with pytest.raises(EngineDiedError) as caught:
            await each
        assert not caught.value.generation_began
        assert "ended unexpectedly" in caught.value.message
    await rig.ready()
    assert await ask(rig, "count:1", "10") == Tokenized(query_id="10", tokens=[0])
    assert rig.observer.restarts == ["crash"]


async def test_a_query_need_not_wait_for_the_end_of_a_request(rig: Rig) -> None:
    async with aclosing(generate(rig.supervisor, rig.request("started", "forever"))) as stream:
        await anext(stream)
        assert rig.supervisor.state is EngineState.BUSY
        async with asyncio.timeout(5):
            await rig.supervisor.wait_answering()


async def test_a_query_can_wait_for_the_restart(rig: Rig) -> None:
    os.kill(rig.pid, signal.SIGKILL)
    await rig.observer.until(lambda: rig.supervisor.state is EngineState.RESTARTING)
    async with asyncio.timeout(20):
        await rig.supervisor.wait_answering()
    assert await ask(rig, "count:1") == Tokenized(query_id="1", tokens=[0])


async def test_death_fails_the_request_and_the_queries_beside_it(rig: Rig) -> None:
    async with aclosing(generate(rig.supervisor, rig.request("started", "step:x", "forever"))) as stream:
        await anext(stream)
        await anext(stream)
        (waiting,) = held(rig, "10")
        await sent(rig, 1)
        with pytest.raises(EngineDiedError):
            await ask(rig, "kill")
        with pytest.raises(EngineDiedError) as of_query:
            await waiting
        with pytest.raises(EngineDiedError) as of_request:
            await anext(stream)
    assert (of_query.value.generation_began, of_request.value.generation_began) == (False, True)


async def test_stop_fails_pending_queries(rig: Rig) -> None:
    (waiting,) = held(rig, "10")
    await sent(rig, 1)
    await rig.supervisor.stop(5)
    with pytest.raises(EngineDiedError, match="stopped"):
        await waiting
    with pytest.raises(EngineUnavailableError):
        await ask(rig, "count:1")


async def test_a_query_while_the_engine_is_stopped_is_told_that_the_server_ends(rig: Rig) -> None:
    stopping = asyncio.create_task(rig.supervisor.stop(5))
    await asyncio.sleep(0)
    assert rig.supervisor.state is EngineState.READY
    with pytest.raises(EngineStoppingError) as caught:
        await ask(rig, "count:1")
    assert to_api_error(caught.value).code == "draining"
    await stopping


async def test_a_query_without_a_ready_engine_says_why(make_rig: MakeRig) -> None:
    rig = make_rig(starts="slow-load")
    with pytest.raises(EngineUnavailableError) as before_start:
        await ask(rig, "count:1")
    assert before_start.value.state is EngineState.STARTING
    await rig.supervisor.start()
    await rig.observer.until(lambda: rig.supervisor.state is EngineState.LOADING)
    with pytest.raises(EngineUnavailableError) as while_loading:
        await ask(rig, "count:1")
    assert while_loading.value.state is EngineState.LOADING
    await rig.ready()
    assert await ask(rig, "count:1") == Tokenized(query_id="1", tokens=[0])


async def test_nothing_is_kept_of_queries_that_have_ended() -> None:
    pending = PendingQueries()

    def send_in_vain() -> None:
        with pending.expect("1"):
            assert len(pending) == 1
            raise EngineError("too long")

    with pytest.raises(EngineError, match="too long"):
        send_in_vain()
    with pending.expect("1") as reply:
        pending.on_reply(Tokenized(query_id="1", tokens=[7]))
        assert await reply == Tokenized(query_id="1", tokens=[7])
    with pending.expect("1") as reply:
        pending.fail("gone")
        with pytest.raises(EngineDiedError, match="gone"):
            await reply
    assert len(pending) == 0
