"""Requests: events, aborts, cancellation, isolation of one request from the next."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import pytest
from supervisor_rig import FAST, MakeRig, Rig, generate

from s2moe.engine.messages import (
    Abort,
    Configure,
    Failed,
    Finished,
    FrameReader,
    Generate,
    Hello,
    Ping,
    Pong,
    PrefillProgress,
    Started,
    Step,
    encode_frame,
)
from s2moe.server.engine_client import EngineDiedError, EngineState, EngineUnavailableError


async def test_events_come_in_order_up_to_finished(rig: Rig) -> None:
    events = await rig.run("started", "prefill", "step:a", "step:b", "finish")
    assert [type(event) for event in events] == [Started, PrefillProgress, Step, Step, Finished]
    assert [event.content for event in events if isinstance(event, Step)] == ["a", "b"]


async def test_state_is_busy_during_a_request_and_ready_with_its_last_event(rig: Rig) -> None:
    states = []
    async with aclosing(generate(rig.supervisor, rig.request("started", "finish"))) as stream:
        async for event in stream:
            if isinstance(event, Finished):
                await rig.supervisor.wait_ready()  # at once: the engine is idle again
            states.append(rig.supervisor.state)
    assert states[-1] is EngineState.READY
    assert rig.observer.states[-2:] == [EngineState.BUSY, EngineState.READY]


async def test_a_failed_request_leaves_the_engine_ready_for_the_next(rig: Rig) -> None:
    (failed,) = await rig.run("fail:template_error")
    assert isinstance(failed, Failed)
    assert failed.code == "template_error"
    assert isinstance((await rig.run("finish"))[-1], Finished)
    assert rig.observer.restarts == []


async def test_frames_cut_anywhere_give_the_same_events(rig: Rig) -> None:
    events = await rig.run("partial", "started", "step:größer", "finish")
    assert [type(event) for event in events] == [Started, Step, Finished]
    assert isinstance(events[1], Step)
    assert events[1].content == "größer"


async def test_a_second_generation_beside_a_running_one_is_refused(rig: Rig) -> None:
    async with aclosing(generate(rig.supervisor, rig.request("started", "until-abort"))) as stream:
        await anext(stream)
        with pytest.raises(RuntimeError, match="one at a time"):
            await rig.run("finish")
    assert isinstance((await rig.run("finish"))[-1], Finished)


async def test_aclose_aborts_and_returns_when_the_engine_is_idle(rig: Rig) -> None:
    stream = generate(rig.supervisor, rig.request("started", "until-abort:0.1"))
    await anext(stream)
    begin = time.monotonic()
    await stream.aclose()
    assert time.monotonic() - begin >= 0.1
    assert rig.supervisor.state is EngineState.READY
    assert isinstance((await rig.run("finish"))[-1], Finished)
    assert rig.n_starts == 1


async def test_cancelling_the_iterating_task_returns_when_the_engine_is_idle(rig: Rig) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in generate(rig.supervisor, rig.request("started", "until-abort:0.1")):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.supervisor.state is EngineState.READY
    assert isinstance((await rig.run("finish"))[-1], Finished)


async def test_a_request_cancelled_before_its_first_event_is_aborted(rig: Rig) -> None:
    task = asyncio.create_task(rig.run("until-abort", request_id="early"))
    await rig.observer.until(lambda: rig.supervisor.state is EngineState.BUSY)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(encode_frame(Abort(request_id="early"))) in rig.observer.n_bytes["to_engine"]
    assert rig.supervisor.state is EngineState.READY


async def test_a_second_cancellation_ends_the_wait_but_not_the_cleanup(rig: Rig) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in generate(rig.supervisor, rig.request("started", "until-abort:0.5")):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    n_sent = len(rig.observer.n_bytes["to_engine"])
    task.cancel()
    await rig.observer.until(lambda: len(rig.observer.n_bytes["to_engine"]) > n_sent)
    begin = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.supervisor.state is EngineState.BUSY, "the second cancellation must not wait for the engine"
    assert [type(event) for event in await rig.run("step:next", "finish")] == [Step, Finished]
    assert time.monotonic() - begin >= 0.4, "the next request must wait for the cleanup"
    assert rig.n_starts == 1


async def test_wait_ready_waits_for_the_end_of_an_abort(rig: Rig) -> None:
    stream = generate(rig.supervisor, rig.request("started", "until-abort:0.2"))
    await anext(stream)
    closing = asyncio.create_task(stream.aclose())
    await asyncio.sleep(0)
    assert rig.supervisor.state is EngineState.BUSY
    await rig.ready()
    assert rig.supervisor.state is EngineState.READY
    await closing


async def test_events_of_an_aborted_request_never_reach_the_next_one(rig: Rig) -> None:
    stream = generate(rig.supervisor, rig.request("started", "steps-after-abort:200"))
    await anext(stream)
    await stream.aclose()
    events = await rig.run("step:mine", "finish")
    assert [event.content for event in events if isinstance(event, Step)] == ["mine"]


async def test_events_with_a_foreign_request_id_are_dropped(rig: Rig) -> None:
    events = await rig.run("step-of:older", "finish-of:older", "step:mine", "finish")
    assert [type(event) for event in events] == [Step, Finished]
    assert isinstance(events[0], Step)
    assert events[0].content == "mine"


async def test_an_engine_that_ignores_abort_is_killed_as_hung(make_rig: MakeRig) -> None:
    rig = make_rig(times=replace(FAST, abort_timeout_seconds=0.3))
    await rig.supervisor.start()
    await rig.ready()
    stream = generate(rig.supervisor, rig.request("started", "forever"))
    await anext(stream)
    async with asyncio.timeout(5):
        await stream.aclose()
    await rig.ready()
    assert rig.observer.restarts == ["hang"]
    assert "did not abort" in rig.observer.restart_details[0]
    assert isinstance((await rig.run("finish"))[-1], Finished)


@pytest.mark.parametrize(("actions", "began"), [(("started",), False), (("started", "step:x"), True)])
async def test_death_tells_whether_generation_began(rig: Rig, actions: tuple[str, ...], began: bool) -> None:
    with pytest.raises(EngineDiedError) as caught:
        await rig.run(*actions, "kill")
    assert caught.value.generation_began is began
    assert "ended unexpectedly" in caught.value.message


async def test_events_sent_before_the_death_are_delivered_before_the_error(rig: Rig) -> None:
    async with aclosing(generate(rig.supervisor, rig.request("steps:100", "exit:4"))) as stream:
        for i in range(100):
            event = await anext(stream)
            assert isinstance(event, Step)
            assert event.content == str(i)
        with pytest.raises(EngineDiedError):
            await anext(stream)


async def test_generate_without_a_ready_engine_says_why(make_rig: MakeRig) -> None:
    rig = make_rig()
    with pytest.raises(EngineUnavailableError) as before_start:
        await rig.run("finish")
    assert before_start.value.state is EngineState.STARTING
    await rig.supervisor.start()
    await rig.ready()
    with pytest.raises(EngineDiedError):
        await rig.run("kill")
    with pytest.raises(EngineUnavailableError) as after_death:
        await rig.run("finish")
    assert after_death.value.state is EngineState.RESTARTING


async def test_a_slow_consumer_holds_up_neither_pongs_nor_other_events(rig: Rig) -> None:
    n_steps = 20_000
    async with aclosing(
        generate(rig.supervisor, rig.request("started", f"steps:{n_steps}", "finish"))
    ) as stream:
        await anext(stream)
        await rig.observer.until(lambda: rig.supervisor.state is EngineState.READY)
        n_messages = len(rig.observer.n_bytes["from_engine"])
        await rig.observer.until(lambda: len(rig.observer.n_bytes["from_engine"]) > n_messages)
        assert rig.supervisor.heartbeat_age_seconds < 1.0
        contents = [event.content async for event in stream if isinstance(event, Step)]
    assert contents == [str(i) for i in range(n_steps)]


async def test_a_death_is_seen_while_the_consumer_takes_nothing(rig: Rig) -> None:
    async with aclosing(generate(rig.supervisor, rig.request("started", "steps:5000", "kill"))) as stream:
        await anext(stream)
        await rig.observer.until(lambda: EngineState.RESTARTING in rig.observer.states)
        for _ in range(5000):
            assert isinstance(await anext(stream), Step)
        with pytest.raises(EngineDiedError):
            await anext(stream)


async def test_the_end_of_every_request_reaches_the_observer(rig: Rig) -> None:
    await rig.run("finish", request_id="whole")
    stream = generate(rig.supervisor, rig.request("started", "until-abort", request_id="aborted"))
    await anext(stream)
    await stream.aclose()
    await rig.run("fail:internal", request_id="failed")
    await rig.run("finish-of:foreign", "finish", request_id="last")
    ends = [(event.request_id, type(event)) for event in rig.observer.finished]
    assert ends == [("whole", Finished), ("aborted", Finished), ("failed", Failed), ("last", Finished)]


async def test_stats_and_message_sizes_reach_the_observer(rig: Rig) -> None:
    request = rig.request("stats:7", "step:x", "finish")
    async for _ in generate(rig.supervisor, request):
        pass
    assert [stats.generated_tokens for stats in rig.observer.stats] == [7]
    to_engine = rig.observer.n_bytes["to_engine"]
    assert to_engine[0] == len(encode_frame(Configure(model_path="model.gguf")))
    assert len(encode_frame(request)) in to_engine
    step = Step(request_id=request.request_id, content="x")
    assert len(encode_frame(step)) in rig.observer.n_bytes["from_engine"]


def test_frame_reader_gives_the_size_of_each_message() -> None:
    frames = [
        encode_frame(message)
        for message in (
            Pong(nonce=1, state="idle"),
            Hello(protocol_version=1, pid=2, engine_version="3", llama_build="b4"),
        )
    ]
    reader = FrameReader(from_engine=True)
    assert len(reader.feed(frames[0] + frames[1][:7])) == 1
    assert reader.frame_bytes == [len(frames[0])]
    assert len(reader.feed(frames[1][7:])) == 1
    assert reader.frame_bytes == [len(frames[1])]
    reader = FrameReader(from_engine=False)
    reader.feed(encode_frame(Ping(nonce=1)) + encode_frame(Generate(request_id="a", messages_json=b"[]")))
    assert len(reader.frame_bytes) == 2
