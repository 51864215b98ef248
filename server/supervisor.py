"""Keeps one engine process alive and speaks with it: the EngineClient that the server really uses.

One task (`_run`) owns the process: spawn, handshake, heartbeat, wait for its end, reap, backoff, again.
Messages are handled synchronously where they arrive (`_on_message`), so a token passes from the socket to
the consumer of its request without a task switch of its own.

    starting ──Hello──▶ loading ──Ready──▶ ready ◀──Finished/Failed── busy
                                             └───────Generate──────────▲
    any of them ──process lost──▶ restarting ──Ready──▶ ready
                                      └──limit reached, or Fatal that a retry cannot mend──▶ dead
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from s2moe.engine.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Configure,
    Detokenized,
    Embed,
    Embedded,
    EngineStats,
    Failed,
    Fatal,
    Finished,
    FromEngine,
    Generate,
    GenerationEvent,
    Hello,
    LoadProgress,
    ModelInfo,
    Ping,
    Plan,
    Pong,
    PrefillProgress,
    ProtocolError,
    Query,
    QueryFailed,
    QueryReply,
    Ready,
    Rendered,
    Shutdown,
    Started,
    Step,
    ToEngine,
    Tokenized,
)
from s2moe.server.engine_client import (
    EngineObserver,
    EngineState,
    EngineStoppingError,
    EngineUnavailableError,
    EventSink,
    TooLongForEngineError,
)
from s2moe.server.engine_exit import EngineExit, OomKillCounter
from s2moe.server.engine_process import EngineProcess
from s2moe.server.own_memory import own_resident_bytes
from s2moe.server.pending_queries import PendingQueries
from s2moe.server.restart_policy import RestartLimits, RestartPolicy
from s2moe.server.running_request import RunningRequest

logger = logging.getLogger(__name__)

ENGINE_COMMAND: Final = (sys.executable, "-m", "s2moe.engine")
_OOM_HINT_TICKS: Final = 10
"""An OOM kill counted by the kernel within this many heartbeats before the death is taken as its cause."""
_REAP_GRACE_SECONDS: Final = 1.0
_PROGRESS_LOG_SECONDS: Final = 2.0
_GENERATION_EVENTS: Final = (Step, PrefillProgress, Started, Finished, Failed)
_QUERY_REPLIES: Final = (Tokenized, Detokenized, Rendered, Embedded, QueryFailed)


@dataclass(frozen=True)
class SupervisionTimes:
    ping_interval_seconds: float = 1.0
    hang_timeout_seconds: float = 30.0
    """No Pong for this long: hung."""
    step_timeout_seconds: float = 600.0
    """One native call of a request that takes this long: hung, although Pongs arrive."""
    hello_timeout_seconds: float = 60.0
    """From the start of the process to Hello; imports on a slow board take their time."""
    abort_timeout_seconds: float = 10.0
    """From Abort to the end of that request; then the engine is hung."""


class _Run:
    """What is known of the current process besides the process itself."""

    def __init__(self, process: EngineProcess, oom_kills: int) -> None:
        self.process = process
        self.hello_at: float | None = None
        self.ready_at: float | None = None
        self.fatal: Fatal | None = None
        self.progress_due = 0.0
        """Monotonic time before which no further load progress is logged."""
        self.plan: Plan | None = None
        """As it was logged before the load."""
        self.silent_seconds = 0.0
        """Since the last Pong, as counted by the heartbeat."""
        self.oom_kills: deque[int] = deque([oom_kills], maxlen=_OOM_HINT_TICKS)


class EngineSupervisor:
    """Implements `engine_client.EngineClient` with a child process that is restarted when it fails.

    `command` is the engine's argument vector, to which `--fd N` is appended.
    """

    def __init__(
        self,
        configure: Configure,
        observer: EngineObserver,
        *,
        command: Sequence[str] | None = None,
        times: SupervisionTimes | None = None,
        restart_limits: RestartLimits | None = None,
        oom_kill_counter: OomKillCounter | None = None,
    ) -> None:
        self.gave_up = asyncio.Event()
        """Set when the engine will never be ready again without anybody having called `stop()`."""
        self.exit_message = ""
        """After `gave_up`: one line that says why; whoever waits for that shows it to the operator."""
        self.fatal_code = ""
        """After `gave_up`: the code of the engine's Fatal, if that was the reason."""
        self._configure = configure
        self._front_end_measured = False
        self._observer = observer
        self._command = tuple(ENGINE_COMMAND if command is None else command)
        self._times = times or SupervisionTimes()
        self._policy = RestartPolicy(restart_limits or RestartLimits())
        self._oom_kill_counter = oom_kill_counter or OomKillCounter()

        self._state = EngineState.STARTING
        self._state_detail = "not started yet"
        self._state_changed = asyncio.Event()
        self._model: ModelInfo | None = None
        self._plan: Plan | None = None
        self._last_pong_at: float | None = None
        self._run: _Run | None = None
        self._generation: RunningRequest | None = None
        self._queries = PendingQueries()
        self._main_task: asyncio.Task[None] | None = None
        self._helpers: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    # ── EngineClient ────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def state_detail(self) -> str:
        return self._state_detail

    @property
    def model(self) -> ModelInfo | None:
        return self._model

    @property
    def plan(self) -> Plan | None:
        return self._plan

    @property
    def heartbeat_age_seconds(self) -> float:
        return 0.0 if self._last_pong_at is None else time.monotonic() - self._last_pong_at

    @property
    def engine_pid(self) -> int | None:
        """The current process, None between two."""
        return None if self._run is None else self._run.process.pid

    async def wait_ready(self) -> None:
        """See EngineClient."""
        await self._wait_for(EngineState.READY)

    async def wait_answering(self) -> None:
        """See EngineClient."""
        await self._wait_for(EngineState.READY, EngineState.BUSY)

    async def run(self, request: Generate, sink: EventSink) -> None:
        """See EngineClient.

        Raises RuntimeError when another request is running, TooLongForEngineError when this one is too long
        for the wire.
        """
        generation = await self._begin(request, sink)
        try:
            await generation.ended.wait()
            if generation.error is not None:
                raise generation.error
        finally:
            if not generation.ended.is_set():
                generation.aborting = True
                # Shielded: a second cancellation interrupts this wait but not the abort, and the next
                # run() waits for its end.
                await asyncio.shield(self._start_helper(self._abort(generation)))

    async def ask(self, query: Query) -> QueryReply:
        """See EngineClient.

        Raises RuntimeError when a query with the same id is under way, TooLongForEngineError when this one is
        too long for the wire.
        """
        self._raise_if_unavailable(EngineState.READY, EngineState.BUSY)
        with self._queries.expect(query.query_id) as reply:
            self._send_or_refuse(query, "query")
            try:
                return await reply
            except asyncio.CancelledError:
                if isinstance(query, Embed):  # the others are done at once
                    self._send(Abort(request_id=query.query_id))
                raise

    # ── life ────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Begins to start the engine and returns at once; `wait_ready()` tells when it is up."""
        if self._main_task is not None:
            raise RuntimeError("the supervisor was already started")
        self._set_state(EngineState.STARTING, "starting the engine process")
        self._main_task = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def stop(self, timeout_seconds: float) -> None:
        """Ends the engine for good and returns when the process is reaped.

        Shutdown is sent at once, SIGTERM after half of `timeout_seconds`, SIGKILL after all of it; with 0
        only the last. A running request ends with EngineDiedError. May be called in any state, and more than
        once.
        """
        self._stopping.set()
        self._signal_state_change()
        if self._main_task is not None:
            await self._end_process(self._main_task, timeout_seconds)
        if self._helpers:
            await asyncio.wait(self._helpers)
        if not self.gave_up.is_set():
            self._set_state(EngineState.DEAD, "stopped")

    async def _end_process(self, main_task: asyncio.Task[None], timeout_seconds: float) -> None:
        try:
            if timeout_seconds:
                await self._ask_to_end(main_task, timeout_seconds)
            if not main_task.done() and self._run is not None:
                self._run.process.kill()
        except asyncio.CancelledError:
            if self._run is not None:
                self._run.process.kill()
            raise
        await asyncio.shield(main_task)

    async def _ask_to_end(self, main_task: asyncio.Task[None], timeout_seconds: float) -> None:
        self._send(Shutdown())
        done, _ = await asyncio.wait([main_task], timeout=timeout_seconds / 2)
        if not done and self._run is not None:
            logger.warning("engine ignored Shutdown for %g s, sending SIGTERM", timeout_seconds / 2)
            self._run.process.terminate()
            done, _ = await asyncio.wait([main_task], timeout=timeout_seconds / 2)
        if not done and self._run is not None:
            logger.warning("engine ignored SIGTERM for %g s, sending SIGKILL", timeout_seconds / 2)

    async def _supervise(self) -> None:
        try:
            backoff: float | None = 0.0
            while backoff is not None and not await self._stopped_within(backoff):
                backoff = await self._run_once()
        except Exception as error:
            logger.exception("the supervisor itself failed")
            if self._run is not None:
                self._run.process.kill()
                await self._run.process.reap(None)
            self._fail_requests("The engine supervisor failed.")
            self._give_up(f"internal error of the engine supervisor: {error!r}")

    async def _stopped_within(self, seconds: float) -> bool:
        if not self._stopping.is_set() and seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._stopping.wait()
        return self._stopping.is_set()

    async def _run_once(self) -> float | None:
        """Starts an engine and returns after its end: the wait in seconds before the next start, or None
        when there is to be none."""
        try:
            process = await EngineProcess.spawn(self._command, self._on_message)
        except OSError as error:
            self._set_restarting("the engine could not be started")
            message = f"cannot run {self._command[0]}: {error}"
            return self._judge(EngineExit(None, fatal_message=message), None)
        run = self._run = _Run(process, self._oom_kill_counter.read())
        await process.connect()
        logger.info("engine started", extra={"fields": {"pid": process.pid}})
        if self._stopping.is_set():  # stop() came while there was no process to send Shutdown to
            process.kill()
        heartbeat = asyncio.create_task(self._heartbeat(run))
        try:
            await process.lost.wait()
        finally:
            heartbeat.cancel()
        lost_at = time.monotonic()
        self._set_restarting("the engine process is gone")
        self._fail_requests(_client_message(process, stopping=self._stopping.is_set()))
        returncode = await process.reap(None if self._stopping.is_set() else _REAP_GRACE_SECONDS)
        await asyncio.gather(heartbeat, return_exceptions=True)
        self._run = None
        if self._stopping.is_set():
            logger.info("engine stopped with code %d", returncode)
            return None
        engine_exit = EngineExit(
            returncode,
            condemnation=process.condemnation,
            oom_killed=self._oom_kill_counter.read() > run.oom_kills[0],
            fatal_message=run.fatal.message if run.fatal else None,
            stderr_tail=process.stderr_tail,
        )
        if run.fatal is not None and not run.fatal.retryable:
            self.fatal_code = run.fatal.code
            self._give_up(engine_exit.summary)
            return None
        return self._judge(engine_exit, None if run.ready_at is None else lost_at - run.ready_at)

    def _judge(self, engine_exit: EngineExit, ready_seconds: float | None) -> float | None:
        backoff = self._policy.on_failure(time.monotonic(), ready_seconds=ready_seconds)
        if backoff is None:
            self._give_up(f"giving up on the engine after {self._policy.verdict}: {engine_exit.report}")
            return None
        logger.error("%s; restarting in %.1f s", engine_exit.report, backoff)
        self._set_restarting(f"{engine_exit.summary}; restarting in {backoff:.1f} s")
        self._observer.on_restart(engine_exit.reason)
        return backoff

    def _give_up(self, message: str) -> None:
        self.exit_message = message
        self._set_state(EngineState.DEAD, message)
        self.gave_up.set()

    # ── health ──────────────────────────────────────────────────────────────────────────────────

    async def _heartbeat(self, run: _Run) -> None:
        """Pings, and condemns the engine when it hangs. Runs until cancelled."""
        times = self._times
        interval = times.ping_interval_seconds
        nonce = 0
        last_tick = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            # A tick that comes late means that this process was held up (SIGSTOP, a blocked loop), and then
            # the missing Pong may lie unread in the socket: such a gap counts as two intervals at most.
            run.silent_seconds += min(now - last_tick, 2 * interval)
            last_tick = now
            if run.hello_at is None:
                if run.silent_seconds > times.hello_timeout_seconds:
                    message = f"engine did not say hello within {times.hello_timeout_seconds:g} s"
                    run.process.condemn("hang", message)
                continue
            if run.silent_seconds > times.hang_timeout_seconds:
                message = f"engine hung: it answered no ping for {times.hang_timeout_seconds:g} s"
                run.process.condemn("hang", message)
            run.oom_kills.append(self._oom_kill_counter.read())
            nonce += 1
            self._send(Ping(nonce=nonce))

    def _on_pong(self, run: _Run, pong: Pong) -> None:
        self._last_pong_at = time.monotonic()
        run.silent_seconds = 0.0
        # A load is one long native call and shows its own progress; only a request's steps are timed.
        if pong.state != "loading" and pong.step_age_seconds > self._times.step_timeout_seconds:
            run.process.condemn(
                "hang",
                f"engine hung in {pong.state}: no step ended for {self._times.step_timeout_seconds:g} s",
            )

    # ── messages ────────────────────────────────────────────────────────────────────────────────

    def _on_message(self, message: FromEngine, n_bytes: int) -> None:
        run = self._run
        if run is None:
            return
        self._observer.on_message("from_engine", n_bytes)
        generation = self._generation
        if (
            isinstance(message, Step)
            and generation is not None
            and message.request_id == generation.request_id
        ):
            # once per token, so first and on the spot
            if not generation.aborting:
                generation.sink(message)
            generation.began = True
        elif isinstance(message, _GENERATION_EVENTS):
            self._on_generation_event(message)
        elif isinstance(message, _QUERY_REPLIES):
            self._queries.on_reply(message)
        elif isinstance(message, Pong):
            self._on_pong(run, message)
        elif isinstance(message, EngineStats):
            self._observer.on_stats(message)
        else:
            self._on_handshake(run, message)

    def _on_generation_event(self, event: GenerationEvent) -> None:
        generation = self._generation
        if generation is None or event.request_id != generation.request_id:
            logger.warning(
                "dropped %s of request %s, which is not running", type(event).__name__, event.request_id
            )
            return
        if not generation.aborting:
            generation.sink(event)
        if isinstance(event, Finished | Failed):
            self._observer.on_finished(event)
            self._generation = None
            self._set_state(EngineState.READY, "ready")
            generation.ended.set()

    def _on_handshake(self, run: _Run, message: Hello | LoadProgress | Ready | Fatal) -> None:
        if isinstance(message, Fatal):
            self._on_fatal(run, message)
        elif isinstance(message, Hello):
            self._on_hello(run, message)
        elif run.hello_at is None or run.ready_at is not None:
            raise ProtocolError(f"{type(message).__name__} at the wrong time")
        elif isinstance(message, LoadProgress):
            if message.plan is not None:
                run.plan = message.plan
                _log_plan(message.plan)
            parts = (f"loading {message.phase} {message.fraction * 100:.0f} %", message.detail)
            self._set_loading(", ".join(part for part in parts if part))
            if time.monotonic() > run.progress_due:
                run.progress_due = time.monotonic() + _PROGRESS_LOG_SECONDS
                logger.info("%s", self._state_detail)
        else:
            run.ready_at = time.monotonic()
            self._model = message.model
            self._plan = message.plan
            self._observer.on_start_phase("load", run.ready_at - run.hello_at)
            _log_plan(message.plan, run.plan)
            self._set_state(EngineState.READY, "ready")

    def _on_fatal(self, run: _Run, fatal: Fatal) -> None:
        run.fatal = fatal
        # It exits by itself; the kill, without effect by then, is for one that does not.
        asyncio.get_running_loop().call_later(
            _REAP_GRACE_SECONDS, run.process.condemn, "crash", "engine did not exit after a fatal error"
        )

    def _on_hello(self, run: _Run, hello: Hello) -> None:
        if run.hello_at is not None:
            raise ProtocolError("a second Hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            versions = f"protocol version {hello.protocol_version}, this server {PROTOCOL_VERSION}"
            message = f"it speaks {versions}; install server and engine from one release"
            self._on_fatal(run, Fatal(code="protocol_version", message=message))
            run.process.condemn("crash", message)
            return
        run.hello_at = time.monotonic()
        run.silent_seconds = 0.0
        self._observer.on_start_phase("spawn", run.hello_at - run.process.started_at)
        self._set_loading("loading")
        self._measure_front_end()
        self._send(self._configure)

    def _measure_front_end(self) -> None:
        """Once, for all starts: the plan has a reserve for what this process grows by while it serves, and an
        engine that restarts must get the plan of the first one."""
        if self._configure.front_end_bytes and not self._front_end_measured:
            self._configure = msgspec.structs.replace(self._configure, front_end_bytes=own_resident_bytes())
            self._front_end_measured = True

    def _send(self, message: ToEngine) -> None:
        if self._run is not None and (n_bytes := self._run.process.send(message)):
            self._observer.on_message("to_engine", n_bytes)

    def _send_or_refuse(self, message: Generate | Query, what: str) -> None:
        try:
            self._send(message)
        except ProtocolError as error:
            reason = f"The {what} is too long for the engine: {error}."
            raise TooLongForEngineError(reason, MAX_FRAME_BYTES) from error

    # ── requests ────────────────────────────────────────────────────────────────────────────────

    async def _begin(self, request: Generate, sink: EventSink) -> RunningRequest:
        while (running := self._generation) is not None:
            if not running.aborting:
                raise RuntimeError(f"request {running.request_id} is still running; one at a time")
            await running.ended.wait()
        self._raise_if_unavailable(EngineState.READY)
        # No await from the check of READY to the end: nothing may come in between.
        self._send_or_refuse(request, "request")
        generation = self._generation = RunningRequest(request.request_id, sink)
        self._set_state(EngineState.BUSY, f"answering request {request.request_id}")
        return generation

    async def _abort(self, generation: RunningRequest) -> None:
        """Returns when the engine has let go of the request, one way or the other."""
        self._send(Abort(request_id=generation.request_id))
        timeout_seconds = self._times.abort_timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                await generation.ended.wait()
        except TimeoutError:
            if self._run is not None and self._generation is generation:
                message = f"engine hung: it did not abort a request within {timeout_seconds:g} s"
                self._run.process.condemn("hang", message)
            await generation.ended.wait()

    def _fail_requests(self, message: str) -> None:
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.fail(message)
        self._queries.fail(message)

    def _start_helper(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)
        return task

    # ── state ───────────────────────────────────────────────────────────────────────────────────

    def _set_state(self, state: EngineState, detail: str) -> None:
        self._state_detail = detail
        if state is self._state:
            return
        self._state = state
        self._observer.on_state(state)
        self._signal_state_change()

    def _set_restarting(self, detail: str) -> None:
        if not self._stopping.is_set():
            self._set_state(EngineState.RESTARTING, detail)

    def _set_loading(self, detail: str) -> None:
        """The first load shows as `loading`; a later one is part of `restarting`."""
        first = self._state in (EngineState.STARTING, EngineState.LOADING)
        self._set_state(EngineState.LOADING if first else EngineState.RESTARTING, detail)

    def _signal_state_change(self) -> None:
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    async def _wait_for(self, *usable: EngineState) -> None:
        while self._stopping.is_set() or self._state not in usable:
            self._raise_if_never_ready()
            await self._state_changed.wait()

    def _raise_if_unavailable(self, *usable: EngineState) -> None:
        self._raise_if_never_ready()
        if self._state not in usable:
            raise EngineUnavailableError(f"The engine is not ready: {self._state_detail}.", self._state)

    def _raise_if_never_ready(self) -> None:
        if self._state is EngineState.DEAD:
            raise EngineUnavailableError(f"The engine is not available: {self._state_detail}.", self._state)
        if self._stopping.is_set():
            raise EngineStoppingError("The server is shutting down.", self._state)


def _log_plan(plan: Plan | None, before: Plan | None = None) -> None:
    """`before`: the one that was logged already; then only what the load has changed is of interest."""
    if plan is None:
        return
    for line in plan.lines:
        if before is None:
            logger.info("%s", line)
        elif line not in before.lines:
            logger.info("after the load: %s", line)
    if before is None or not before.warnings:
        for line in plan.warnings:
            logger.warning("%s", line)


def _client_message(process: EngineProcess, *, stopping: bool) -> str:
    """For the client whose request is lost: no paths, no stderr."""
    if stopping:
        return "The server was stopped before the answer was complete."
    if process.condemnation is not None and process.condemnation.reason == "hang":
        return "The engine stopped responding and was ended; the request is lost."
    return "The engine process ended unexpectedly; the request is lost."
