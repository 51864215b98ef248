"""Start, handshake, death, restart and giving up, with real processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import statistics
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from supervisor_rig import MakeRig, Rig, generate, gone

from s2moe.engine.messages import PROTOCOL_VERSION, Finished
from s2moe.server.engine_client import EngineDiedError, EngineState, EngineUnavailableError
from s2moe.server.engine_exit import OomKillCounter
from s2moe.server.restart_policy import RestartLimits


async def test_start_returns_at_once_and_reports_phases_and_progress(make_rig: MakeRig) -> None:
    rig = make_rig(starts="slow-load")
    assert rig.supervisor.model is None
    assert rig.supervisor.heartbeat_age_seconds == 0.0
    await rig.supervisor.start()
    assert rig.supervisor.state is EngineState.STARTING
    await rig.ready()
    assert rig.observer.states == [EngineState.LOADING, EngineState.READY]
    assert "loading model 42 %, layer" in rig.observer.details
    assert [phase for phase, _ in rig.observer.phases] == ["spawn", "load"]
    spawn_seconds, load_seconds = (seconds for _, seconds in rig.observer.phases)
    assert spawn_seconds > 0
    assert load_seconds >= 8 * 0.05
    assert rig.supervisor.model is not None
    assert rig.supervisor.model.name == "scripted"
    assert rig.observer.restarts == []


async def test_the_memory_plan_is_logged(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "s2moe")
    rig = make_rig(starts="planned")
    await rig.supervisor.start()
    await rig.ready()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    plan = [("INFO", "half of the memory for this"), ("INFO", "half for that"), ("WARNING", "not much")]
    assert [line for line in lines if line in plan] == plan


async def test_a_plan_that_comes_before_the_load_is_logged_even_if_that_fails(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "s2moe")
    rig = make_rig(starts="planned-crash,normal")
    await rig.supervisor.start()
    await rig.ready()
    messages = [record.getMessage() for record in caplog.records]
    restart = next(index for index, line in enumerate(messages) if "restarting in" in line)
    for line in ("half of the memory for this", "half for that", "not much"):
        assert messages.index(line) < restart
    assert "all is well" in "\n".join(messages)
    assert "all is well" not in messages[restart], "what went well does not explain a crash"


async def test_after_the_load_only_what_it_changed_is_logged(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "s2moe")
    rig = make_rig(starts="planned-measured")
    await rig.supervisor.start()
    await rig.ready()
    messages = [record.getMessage() for record in caplog.records]
    plan = [line for line in messages if "half" in line or "most" in line or "not much" in line]
    assert plan == [
        "half of the memory for this",
        "half for that",
        "not much",
        "after the load: most of the memory for this",
    ]
    assert rig.supervisor.plan is not None
    assert rig.supervisor.plan.lines[0] == "most of the memory for this", "as it was measured"


async def test_without_a_plan_there_is_none_to_show(rig: Rig) -> None:
    assert rig.supervisor.model is not None
    assert rig.supervisor.plan is None


async def test_kill_9_during_decode_is_noticed_at_once(rig: Rig) -> None:
    delays = []
    for _ in range(10):
        async with aclosing(generate(rig.supervisor, rig.request("started", "step:x", "forever"))) as stream:
            await anext(stream)
            await anext(stream)
            killed_at = time.monotonic()
            os.kill(rig.pid, signal.SIGKILL)
            with pytest.raises(EngineDiedError):
                await anext(stream)
            delays.append(time.monotonic() - killed_at)
        assert rig.supervisor.state is EngineState.RESTARTING
        await rig.ready()
    median, worst = statistics.median(delays) * 1e3, max(delays) * 1e3
    print(f"death notice: median {median:.1f} ms, max {worst:.1f} ms of {len(delays)}")
    assert statistics.median(delays) < 0.1
    assert max(delays) < 0.5
    assert rig.observer.restarts == ["crash"] * 10
    assert rig.observer.restart_details[0].startswith("engine killed by signal 9 (SIGKILL)")


async def test_an_idle_engine_that_is_killed_is_restarted(rig: Rig) -> None:
    os.kill(rig.pid, signal.SIGKILL)
    await rig.observer.until(lambda: rig.supervisor.state is EngineState.RESTARTING)
    assert rig.supervisor.model is not None, "the model stays known during a restart"
    await rig.ready()
    assert isinstance((await rig.run("finish"))[-1], Finished)
    assert rig.n_starts == 2
    assert EngineState.LOADING not in rig.observer.states[rig.observer.states.index(EngineState.RESTARTING) :]


async def test_a_front_end_that_grew_is_planned_with_as_of_the_first_start(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "s2moe")

    def told() -> list[int]:
        lines = (record.getMessage() for record in caplog.records)
        return [int(line.split()[3]) for line in lines if line.startswith("front end of")]

    rig = make_rig(front_end_bytes=1)
    await rig.supervisor.start()
    await rig.ready()
    growth = b"x" * (64 << 20)
    os.kill(rig.pid, signal.SIGKILL)
    await rig.observer.until(lambda: rig.supervisor.state is EngineState.RESTARTING)
    await rig.ready()
    assert len(growth) > 0
    await rig.run("finish")  # the lines of stderr come by a way of their own
    first, second = told()
    assert first == second
    assert first > 1 << 20, "measured by the supervisor"


async def test_a_queued_waiter_survives_a_restart(rig: Rig) -> None:
    async def queued() -> list[object]:
        await rig.supervisor.wait_ready()
        return list(await rig.run("step:queued", "finish"))

    async with aclosing(generate(rig.supervisor, rig.request("started", "forever"))) as stream:
        await anext(stream)
        waiter = asyncio.create_task(queued())
        await asyncio.sleep(0)
        os.kill(rig.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError):
            await anext(stream)
        assert not waiter.done()
    assert len(await waiter) == 2
    assert rig.n_starts == 2


async def test_an_unasked_exit_0_is_a_crash(rig: Rig) -> None:
    with pytest.raises(EngineDiedError):
        await rig.run("exit:0")
    await rig.ready()
    assert rig.observer.restarts == ["crash"]
    assert "exited with code 0 although nobody asked" in rig.observer.restart_details[0]


async def test_an_engine_that_closes_its_socket_but_lives_on_is_killed(rig: Rig) -> None:
    pid = rig.pid
    with pytest.raises(EngineDiedError):
        await rig.run("close", "forever")
    await rig.ready()
    assert gone(pid)
    assert rig.observer.restarts == ["crash"]


@pytest.mark.parametrize(
    ("action", "said"), [("garbage", "undecodable frame"), ("oversize", "longer than the limit")]
)
async def test_a_broken_frame_ends_the_engine(rig: Rig, action: str, said: str) -> None:
    with pytest.raises(EngineDiedError):
        await rig.run("started", action, "forever")
    await rig.ready()
    assert rig.observer.restarts == ["crash"]
    assert said in rig.observer.restart_details[0]
    assert isinstance((await rig.run("finish"))[-1], Finished)


async def test_a_second_hello_breaks_the_protocol(make_rig: MakeRig) -> None:
    rig = make_rig(starts="second-hello,normal")
    await rig.supervisor.start()
    await rig.observer.until(lambda: bool(rig.observer.restarts))
    assert "second Hello" in rig.observer.restart_details[0]


async def test_an_observer_that_raises_costs_one_engine_and_not_the_supervisor(rig: Rig) -> None:
    def fail(_: object) -> None:
        raise ValueError("observer bug")

    rig.observer.on_stats = fail  # type: ignore[method-assign]
    with pytest.raises(EngineDiedError):
        await rig.run("stats:1", "forever")
    await rig.ready()
    assert "observer bug" in rig.observer.restart_details[0]


async def test_memory_exhaustion_in_stderr_is_reported_as_oom(rig: Rig) -> None:
    with pytest.raises(EngineDiedError):
        await rig.run("say:ggml_aligned_malloc: Out of memory, wanted 9 GB", "exit:1")
    await rig.ready()
    assert rig.observer.restarts == ["oom"]


async def test_a_kill_by_the_kernels_oom_killer_is_reported_as_oom(make_rig: MakeRig, tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("oom 0\noom_kill 3\n")
    rig = make_rig(oom_kill_counter=OomKillCounter((events,)))
    await rig.supervisor.start()
    await rig.ready()
    os.kill(rig.pid, signal.SIGKILL)
    await rig.observer.until(lambda: len(rig.observer.restarts) == 1)
    await rig.ready()
    events.write_text("oom 1\noom_kill 4\n")
    os.kill(rig.pid, signal.SIGKILL)
    await rig.observer.until(lambda: len(rig.observer.restarts) == 2)
    assert rig.observer.restarts == ["crash", "oom"]
    assert "ran out of memory" in rig.observer.restart_details[1]


async def test_failed_starts_are_repeated_with_doubling_backoff(make_rig: MakeRig) -> None:
    rig = make_rig(starts="crash,crash,crash,normal", limits=RestartLimits(first_backoff_seconds=0.1))
    begin = time.monotonic()
    await rig.supervisor.start()
    await rig.ready()
    assert time.monotonic() - begin >= 0.1 + 0.2 + 0.4
    assert [detail.rpartition("in ")[2] for detail in rig.observer.restart_details] == [
        "0.1 s",
        "0.2 s",
        "0.4 s",
    ]
    assert rig.n_starts == 4


async def test_the_crash_limit_ends_in_gave_up_with_the_engines_last_words(make_rig: MakeRig) -> None:
    rig = make_rig(starts="crash", limits=RestartLimits(first_backoff_seconds=0.01, max_failures=5))
    await rig.supervisor.start()
    waiter = asyncio.create_task(rig.supervisor.wait_ready())
    async with asyncio.timeout(20):
        await rig.supervisor.gave_up.wait()
    assert rig.n_starts == 5
    assert rig.observer.restarts == ["crash"] * 4
    assert rig.supervisor.state is EngineState.DEAD
    message = rig.supervisor.exit_message
    assert "5 failures within 60 s" in message
    assert "engine exited with code 3" in message
    assert "boom: scripted crash at start" in message
    assert "\n" not in message
    with pytest.raises(EngineUnavailableError) as waited:
        await waiter
    assert waited.value.state is EngineState.DEAD
    with pytest.raises(EngineUnavailableError):
        await rig.run("finish")
    await rig.supervisor.stop(1)
    assert rig.supervisor.exit_message == message, "stop() must not blur why the engine died"
    assert rig.supervisor.state_detail == message


async def test_fatal_without_retry_gives_up_at_once_with_its_message(make_rig: MakeRig) -> None:
    rig = make_rig(starts="fatal")
    await rig.supervisor.start()
    async with asyncio.timeout(10):
        await rig.supervisor.gave_up.wait()
    assert "no such model; check --model" in rig.supervisor.exit_message
    assert rig.supervisor.fatal_code == "model_not_found"
    assert rig.n_starts == 1
    assert rig.observer.restarts == []


async def test_fatal_with_retry_is_restarted(make_rig: MakeRig) -> None:
    rig = make_rig(starts="fatal-retryable,normal")
    await rig.supervisor.start()
    await rig.ready()
    assert rig.n_starts == 2
    assert "no such model" in rig.observer.restart_details[0]


async def test_an_engine_that_does_not_exit_after_fatal_is_killed(make_rig: MakeRig) -> None:
    rig = make_rig(starts="fatal-lingers")
    await rig.supervisor.start()
    await rig.observer.until(lambda: rig.supervisor.state is EngineState.LOADING)
    pid = rig.pid
    async with asyncio.timeout(10):
        await rig.supervisor.gave_up.wait()
    assert "no such model" in rig.supervisor.exit_message
    assert gone(pid)


async def test_another_protocol_version_is_fatal(make_rig: MakeRig) -> None:
    rig = make_rig(starts="wrong-version")
    await rig.supervisor.start()
    async with asyncio.timeout(10):
        await rig.supervisor.gave_up.wait()
    versions = f"protocol version {PROTOCOL_VERSION + 1}, this server {PROTOCOL_VERSION}"
    assert versions in rig.supervisor.exit_message
    assert rig.n_starts == 1


async def test_a_command_that_cannot_run_is_given_up_with_the_reason(make_rig: MakeRig) -> None:
    limits = RestartLimits(first_backoff_seconds=0.01, max_failures=2)
    rig = make_rig(command=["/nonexistent/engine"], limits=limits)
    await rig.supervisor.start()
    async with asyncio.timeout(10):
        await rig.supervisor.gave_up.wait()
    assert "cannot run /nonexistent/engine" in rig.supervisor.exit_message


def n_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_twenty_restarts_leave_no_zombie_and_no_descriptor(rig: Rig) -> None:
    before, pids = n_fds(), []
    for _ in range(20):
        pids.append(rig.pid)
        os.kill(rig.pid, signal.SIGKILL)
        n_restarts = len(rig.observer.restarts)
        await rig.observer.until(lambda n=n_restarts: len(rig.observer.restarts) > n)  # type: ignore[misc]
        await rig.ready()
    assert len(set(pids)) == 20
    assert n_fds() == before
    assert [pid for pid in pids if not gone(pid)] == []
