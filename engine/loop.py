"""The engine's life: handshake, load, then one request after the other until the front end leaves.

Three threads. The main thread loads the model, runs requests and computes embeddings. The reader thread
receives messages, answers pings and throws the abort switch, so both work while the main thread is inside a
long native call. The query desk's thread answers what needs no decode.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import Any

import msgspec

from s2moe.engine import messages as wire
from s2moe.engine.backlog import Backlog
from s2moe.engine.channel import Channel
from s2moe.engine.errors import EngineStartError, RequestError
from s2moe.engine.expert_stats import ActivityMeter, cache_gauges
from s2moe.engine.generation import Generation
from s2moe.engine.hot_experts import ModelIdentity
from s2moe.engine.memory import available_bytes, resident_bytes, total_bytes
from s2moe.engine.memory_guard import DROP_PROMPT_CACHE, GROW_CACHE, SHRINK_CACHE
from s2moe.engine.model import Model
from s2moe.engine.native import LibraryNotFoundError, NativeError
from s2moe.engine.queries import QueryDesk, full, loading, reply_to, send_reply
from s2moe.engine.warm_start import WarmStart

logger = logging.getLogger(__name__)

STATS_INTERVAL_SECONDS = 1.0
IDLE_STATS_INTERVAL_SECONDS = 10.0
"""While nothing happens; a warm-up is reported as often as a request."""
CAPABILITIES = [
    "chat",
    "grammar",
    "json-schema",
    "logprobs",
    "prefix-reuse",
    "queries",
    "raw-prompt",
    "reasoning",
    "speculation",
    "tools",
]
_Work = wire.Configure | wire.Generate | wire.Embed | wire.Shutdown


class Engine:
    """One engine process on one channel."""

    def __init__(self, channel: Channel, llama_build: str, version: str) -> None:
        self._channel = channel
        self._llama_build = llama_build
        self._version = version
        self._inbox: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._backlog = Backlog()
        self._lock = threading.Lock()
        # guarded by _lock
        self._model: Model | None = None
        self._running: Generation | None = None
        self._running_id: str | None = None
        self._is_embedding = False
        self._is_stopping = False
        self._queries: QueryDesk | None = None
        self._queued_ids: set[str] = set()
        self._aborted_ids: set[str] = set()
        # written by the main thread only
        self._last_step = time.monotonic()
        self._sent = wire.EngineStats()
        self._stats_due = 0.0
        self._idle_stats_due = 0.0
        self._warm_start: WarmStart | None = None
        self._activity = ActivityMeter()
        self._expert_reader: dict[str, Any] = {}

    # the reader thread

    def _read(self) -> None:
        try:
            while (received := self._channel.receive()) is not None:
                for message in received:
                    self._dispatch(message)
            logger.debug("front end closed the connection")
        except (OSError, wire.ProtocolError) as error:
            logger.error("connection to the front end failed: %s", error)
        # what is worth saving is saved every few minutes, and a native call may still run for long
        os._exit(0)

    def _dispatch(self, message: wire.ToEngine | wire.FromEngine) -> None:
        match message:
            case wire.Ping():
                self._channel.send(self._pong(message.nonce))
            case wire.Abort():
                self._abort(message.request_id)
            case wire.Generate():
                with self._lock:
                    self._queued_ids.add(message.request_id)
                self._inbox.put(message)
            case wire.Tokenize() | wire.Detokenize() | wire.ApplyTemplate() | wire.Embed():
                self._take_query(message)
            case wire.Configure() | wire.Shutdown():
                self._inbox.put(message)
                if isinstance(message, wire.Shutdown):
                    self._stop()
            case _:
                raise wire.ProtocolError(f"unexpected {type(message).__name__}")

    def _take_query(self, query: wire.Query) -> None:
        with self._lock:
            desk = self._queries
        if desk is None:
            self._channel.send(loading(query))
        elif not isinstance(query, wire.Embed):
            desk.submit(query)
        elif self._backlog.enter(query):
            with self._lock:
                self._queued_ids.add(query.query_id)
            self._inbox.put(query)
        else:
            self._channel.send(full(query))

    def _pong(self, nonce: int) -> wire.Pong:
        with self._lock:
            if self._model is None:
                state = "loading"
            elif self._is_embedding:
                state = "prefill"
            elif self._running is None:
                state = "idle"
            else:
                state = self._running.phase
            return wire.Pong(
                nonce=nonce,
                state=state,
                request_id=self._running_id,
                step_age_seconds=0.0 if state == "idle" else time.monotonic() - self._last_step,
            )

    def _abort(self, request_id: str) -> None:
        with self._lock:
            if request_id == self._running_id and self._model is not None:
                self._model.abort.request()
            elif request_id in self._queued_ids:
                self._aborted_ids.add(request_id)

    def _stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            if self._model is not None and (self._is_embedding or self._running is not None):
                self._model.abort.request()

    # the main thread

    def run(self) -> int:
        """Returns the process's exit code."""
        self._channel.send(
            wire.Hello(
                protocol_version=wire.PROTOCOL_VERSION,
                pid=os.getpid(),
                engine_version=self._version,
                llama_build=self._llama_build,
                capabilities=CAPABILITIES,
            )
        )
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        configure = self._inbox.get()
        if not isinstance(configure, wire.Configure):
            return 0 if isinstance(configure, wire.Shutdown) else 1
        model = self._load(configure)
        if model is None:
            return 1
        while isinstance(message := self._next_message(model), wire.Generate | wire.Embed):
            if self._is_stopping:
                break
            if isinstance(message, wire.Embed):
                self._embed(model, message)
            else:
                self._generate(model, message)
            self._keep(model)
        self._close(model)
        return 0

    def _close(self, model: Model) -> None:
        if self._warm_start is not None:
            self._warm_start.close()
        if self._queries is not None and not self._queries.close():
            os._exit(0)  # a thread is inside the model, which cannot be freed then
        model.close()

    def _next_message(self, model: Model) -> _Work:
        """Waits for it; meanwhile reports what goes on in the background."""
        while True:
            try:
                return self._inbox.get(timeout=STATS_INTERVAL_SECONDS)
            except queue.Empty:
                stats = self._background_stats(model)
                now = time.monotonic()
                news = stats.experts is not None or stats.memory_pressure_events or stats.prompt_cache_events
                if news or now >= self._idle_stats_due:
                    self._idle_stats_due = now + IDLE_STATS_INTERVAL_SECONDS
                    self._channel.send(stats)
                self._keep(model)

    def _keep(self, model: Model) -> None:
        """Writes down now and then what the next run can use."""
        if self._warm_start is not None:
            self._warm_start.keep()
        model.keep_learnt()

    def _load(self, configure: wire.Configure) -> Model | None:
        started = time.monotonic()
        last_sent = ("", -1.0)

        def report(phase: str, fraction: float) -> None:
            nonlocal last_sent
            self._last_step = time.monotonic()
            if phase != last_sent[0] or fraction >= last_sent[1] + 0.01 or fraction >= 1.0:
                last_sent = (phase, fraction)
                self._channel.send(wire.LoadProgress(phase=phase, fraction=fraction))

        def report_plan(plan: wire.Plan) -> None:
            self._channel.send(wire.LoadProgress(phase="plan", fraction=1.0, plan=plan))

        try:
            model = Model(configure, report, report_plan)
            self._warm_start = _prepare_warm_start(model, configure)
        except (EngineStartError, LibraryNotFoundError, NativeError) as error:
            code = error.code if isinstance(error, EngineStartError) else "library_invalid"
            self._channel.send(wire.Fatal(code=code, message=str(error)))
            return None
        except MemoryError:
            self._channel.send(
                wire.Fatal(code="insufficient_memory", message="not enough memory to load the model")
            )
            return None
        with self._lock:
            self._model = model
            self._queries = QueryDesk(model, self._backlog, self._channel.send)
        if model.experts is not None:
            self._expert_reader = model.experts.reader()
        plan = None if model.plan is None else model.plan.to_wire(self._expert_reader, model.gpu_line)
        self._channel.send(wire.Ready(model=model.info, load_seconds=time.monotonic() - started, plan=plan))
        # the report first: it also fits the cache to the budget, and would take slots just being filled
        self._channel.send(self._background_stats(model))
        if self._warm_start is not None:
            self._warm_start.begin()
        return model

    def _embed(self, model: Model, query: wire.Embed) -> None:
        def answer(query: wire.Embed) -> wire.Embedded:
            vectors, n_tokens = model.embed(query.texts, query.token_lists)
            return wire.Embedded(query_id=query.query_id, vectors=vectors, n_tokens=n_tokens)

        with self._lock:
            self._queued_ids.discard(query.query_id)
            self._is_embedding, self._running_id = True, query.query_id
            self._last_step = time.monotonic()
            model.abort.clear()
            if self._is_stopping or query.query_id in self._aborted_ids:
                model.abort.request()
        try:
            reply = reply_to(query, answer)
        finally:
            with self._lock:
                self._is_embedding, self._running_id = False, None
                self._aborted_ids.discard(query.query_id)
                model.abort.clear()
            self._backlog.leave(query)
        send_reply(self._channel.send, reply)

    def _generate(self, model: Model, request: wire.Generate) -> None:
        generation = Generation(model, request)
        with self._lock:
            self._queued_ids.discard(request.request_id)
            self._running, self._running_id = generation, request.request_id
            self._last_step = time.monotonic()
            model.abort.clear()
            if self._is_stopping or request.request_id in self._aborted_ids:
                model.abort.request()
        self._sent = wire.EngineStats()
        self._stats_due = time.monotonic() + STATS_INTERVAL_SECONDS
        graph_reuses = model.library.n_graph_reuses(model.context)
        try:
            last = self._run_generation(model, generation, request, graph_reuses)
        finally:
            with self._lock:
                self._running = self._running_id = None
                self._aborted_ids.discard(request.request_id)
                model.abort.clear()
        self._send_stats(model, generation, graph_reuses)
        self._channel.send(last)

    def _run_generation(
        self, model: Model, generation: Generation, request: wire.Generate, graph_reuses: int
    ) -> wire.Finished | wire.Failed:
        """Sends all events but the last, which it returns."""
        try:
            for event in generation.run():
                if isinstance(event, wire.Finished):
                    return event
                self._channel.send(event)
                now = self._last_step = time.monotonic()
                if now >= self._stats_due:
                    self._stats_due = now + STATS_INTERVAL_SECONDS
                    self._send_stats(model, generation, graph_reuses)
        except RequestError as error:
            return wire.Failed(
                request_id=request.request_id,
                code=error.code,
                message=error.message,
                param=error.param,
                n_prompt_tokens=error.n_prompt_tokens,
                n_ctx=error.n_ctx,
                timings=generation.timings(),
            )
        except MemoryError:
            return wire.Failed(
                request_id=request.request_id,
                code="insufficient_memory",
                message="out of memory",
                timings=generation.timings(),
            )
        except Exception:
            logger.exception("request %s failed", request.request_id)
            model.forget()
            return wire.Failed(
                request_id=request.request_id,
                code="internal",
                message="internal error in the engine",
                timings=generation.timings(),
            )
        raise AssertionError("a generation ends with Finished or an exception")

    def _send_stats(self, model: Model, generation: Generation, graph_reuses_before: int) -> None:
        total = wire.EngineStats(
            prompt_tokens_computed=generation.n_evaluated_prompt_tokens,
            prompt_tokens_cached=generation.n_cached_tokens,
            generated_tokens=generation.n_completion_tokens,
            decode_steps=generation.n_decode_steps,
            decode_step_seconds=generation.decode_seconds,
            prefill_seconds=generation.prefill_seconds,
            graph_reuses=model.library.n_graph_reuses(model.context) - graph_reuses_before,
        )
        sent, self._sent = self._sent, total
        self._channel.send(
            msgspec.structs.replace(
                self._background_stats(model),
                prompt_tokens_computed=total.prompt_tokens_computed - sent.prompt_tokens_computed,
                prompt_tokens_cached=total.prompt_tokens_cached - sent.prompt_tokens_cached,
                generated_tokens=total.generated_tokens - sent.generated_tokens,
                decode_steps=total.decode_steps - sent.decode_steps,
                decode_step_seconds=total.decode_step_seconds - sent.decode_step_seconds,
                prefill_seconds=total.prefill_seconds - sent.prefill_seconds,
                graph_reuses=total.graph_reuses - sent.graph_reuses,
            )
        )

    def _background_stats(self, model: Model) -> wire.EngineStats:
        """Gauges, and what happens without a request too; to be sent, since its increments are then counted
        as reported."""
        pressure = self._relieve_memory(model)
        experts = slots = None
        if model.experts is not None:
            experts, slots = model.experts.stats(), model.experts.slot_stats()
        return wire.EngineStats(
            kv_cache_tokens=len(model.kv_tokens),
            kv_cache_capacity_tokens=model.n_ctx,
            rss_bytes=resident_bytes(),
            experts=None if experts is None else self._activity.read(experts, slots),
            expert_cache=None if experts is None else cache_gauges(experts, self._expert_reader, slots),
            memory_pools=model.memory_pools(),
            memory_available_bytes=available_bytes(),
            memory_total_bytes=total_bytes(),
            memory_pressure_events=pressure,
            prompt_cache_entries=model.prompt_cache.n_entries,
            prompt_cache_bytes=model.prompt_cache.n_bytes,
            prompt_cache_events=model.prompt_cache.take_events(),
        )

    def _relieve_memory(self, model: Model) -> dict[str, int]:
        """Keeps the budget; returns what had to be done for it, as EngineStats counts it."""
        if model.guard is None:
            return {}
        guard = model.guard
        n_drops, n_shrinks, n_grows = guard.n_drops, guard.n_shrinks, guard.n_grows
        guard.check()
        done = {
            DROP_PROMPT_CACHE: guard.n_drops - n_drops,
            SHRINK_CACHE: guard.n_shrinks - n_shrinks,
            GROW_CACHE: guard.n_grows - n_grows,
        }
        return {action: count for action, count in done.items() if count}


def _prepare_warm_start(model: Model, configure: wire.Configure) -> WarmStart | None:
    """Raises EngineStartError when --hot-experts cannot be used."""
    if model.experts is not None:
        identity = ModelIdentity.of_layout(model.experts.layout)
        # a cache that only feeds slots of a GPU in the same memory holds one layer's experts
        feeds = model.plan is not None and model.plan.feed_bytes > 0
        fits = model.plan is not None and model.plan.all_resident and not feeds
        return WarmStart(model.experts, identity, configure, every_expert_fits=fits)
    if configure.hot_experts_path is not None:
        raise EngineStartError(
            "hot_experts_invalid",
            f"--hot-experts: {configure.model_path} is served without an expert cache; omit the option",
        )
    if configure.expert_policy != "cache":
        raise EngineStartError(
            "expert_policy_unavailable",
            f"--expert-policy: {configure.model_path} is served without an expert cache; omit the option",
        )
    return None
