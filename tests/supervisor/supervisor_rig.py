"""A supervisor over the scripted engine, and an observer that can be awaited."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

from s2moe.engine.messages import Configure, EngineStats, Failed, Finished, Generate, GenerationEvent
from s2moe.server.engine_client import EngineState
from s2moe.server.engine_exit import OomKillCounter
from s2moe.server.restart_policy import RestartLimits
from s2moe.server.supervisor import EngineSupervisor, SupervisionTimes

SCRIPTED_ENGINE = Path(__file__).with_name("scripted_engine.py")
FAST = SupervisionTimes(
    ping_interval_seconds=0.05,
    hang_timeout_seconds=1.0,
    step_timeout_seconds=600.0,
    hello_timeout_seconds=30.0,
    abort_timeout_seconds=10.0,
)
PATIENT = RestartLimits(first_backoff_seconds=0.01, max_backoff_seconds=0.01, max_failures=1000)


def gone(pid: int) -> bool:
    """Neither running nor a zombie."""
    return not Path(f"/proc/{pid}").exists()


async def generate(supervisor: EngineSupervisor, request: Generate) -> AsyncGenerator[GenerationEvent]:
    """`supervisor.run` as an iterator; closing it, or cancelling who iterates, aborts the request."""
    events: asyncio.Queue[GenerationEvent | None] = asyncio.Queue()
    running = asyncio.create_task(supervisor.run(request, events.put_nowait))
    running.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        await running
    finally:
        running.cancel()
        await asyncio.wait([running])


class RecordingObserver:
    def __init__(self) -> None:
        self.states: list[EngineState] = []
        self.details: list[str] = []
        self.stats: list[EngineStats] = []
        self.finished: list[Finished | Failed] = []
        self.phases: list[tuple[str, float]] = []
        self.restarts: list[str] = []
        self.restart_details: list[str] = []
        self.n_bytes: dict[str, list[int]] = {"to_engine": [], "from_engine": []}
        self.supervisor: EngineSupervisor | None = None
        self._changed = asyncio.Event()

    def _pulse(self) -> None:
        if self.supervisor is not None:
            self.details.append(self.supervisor.state_detail)
        self._changed.set()

    async def until(self, condition: Callable[[], bool], timeout_seconds: float = 20) -> None:
        async with asyncio.timeout(timeout_seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def on_state(self, state: EngineState) -> None:
        self.states.append(state)
        self._pulse()

    def on_stats(self, stats: EngineStats) -> None:
        self.stats.append(stats)
        self._pulse()

    def on_finished(self, event: Finished | Failed) -> None:
        self.finished.append(event)
        self._pulse()

    def on_start_phase(self, phase: str, seconds: float) -> None:
        self.phases.append((phase, seconds))
        self._pulse()

    def on_restart(self, reason: str) -> None:
        self.restarts.append(reason)
        if self.supervisor is not None:
            self.restart_details.append(self.supervisor.state_detail)
        self._pulse()

    def on_message(self, direction: str, n_bytes: int) -> None:
        self.n_bytes[direction].append(n_bytes)
        self._pulse()


class Rig:
    """A supervisor over the scripted engine, with what a test wants to ask of it."""

    def __init__(
        self,
        directory: Path,
        *,
        starts: str = "normal",
        on_shutdown: str = "exit",
        times: SupervisionTimes = FAST,
        limits: RestartLimits = PATIENT,
        oom_kill_counter: OomKillCounter | None = None,
        command: list[str] | None = None,
        front_end_bytes: int = 0,
    ) -> None:
        self.count_file = directory / "starts"
        self.observer = RecordingObserver()
        self.supervisor = EngineSupervisor(
            Configure(model_path="model.gguf", front_end_bytes=front_end_bytes),
            self.observer,
            command=command
            or [
                sys.executable,
                str(SCRIPTED_ENGINE),
                *("--starts", starts, "--count-file", str(self.count_file), "--on-shutdown", on_shutdown),
            ],
            times=times,
            restart_limits=limits,
            oom_kill_counter=oom_kill_counter,
        )
        self.observer.supervisor = self.supervisor
        self._n_requests = 0

    @property
    def n_starts(self) -> int:
        return self.count_file.stat().st_size

    @property
    def pid(self) -> int:
        pid = self.supervisor.engine_pid
        assert pid is not None
        return pid

    async def ready(self) -> None:
        async with asyncio.timeout(20):
            await self.supervisor.wait_ready()

    def request(self, *actions: str, request_id: str | None = None) -> Generate:
        self._n_requests += 1
        name = request_id or f"request-{self._n_requests}"
        return Generate(request_id=name, messages_json=json.dumps(actions).encode())

    async def run(self, *actions: str, request_id: str | None = None) -> list[GenerationEvent]:
        events: list[GenerationEvent] = []
        async with (
            asyncio.timeout(20),
            aclosing(generate(self.supervisor, self.request(*actions, request_id=request_id))) as stream,
        ):
            async for event in stream:
                events.append(event)
        return events


MakeRig = Callable[..., Rig]
