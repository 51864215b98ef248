"""Every Prometheus series of the server, in one registry of its own.

The front end owns the counters and the engine sends increments, so they stay monotonic when the engine
restarts. All label values exist from the start, at zero, so that `rate()` sees the first event.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from s2moe.engine.messages import STEP_DURATION_BOUNDS_SECONDS, EngineStats, Failed, Finished, ModelInfo
from s2moe.server.bucket_histogram import BucketHistogram
from s2moe.server.engine_client import EngineState
from s2moe.server.expert_metrics import ExpertMetrics
from s2moe.server.prompt_cache_metrics import PromptCacheMetrics
from s2moe.server.speculation_metrics import SpeculationMetrics

NAMESPACE = "s2moe"
NO_ROUTE = "other"
"""The route of requests that none takes, and of those that are refused before."""
OTHER_METHOD = "other"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", OTHER_METHOD)
APIS = ("chat", "completions", "responses", "messages", "embeddings")
FINISHES = ("stop", "length", "tool_calls", "cancelled", "error")
FAILURE_REASONS = (
    "invalid_request",
    "context_length",
    "bad_schema",
    "template",
    "oom",
    "engine_died",
    "unavailable",
    "model_file",
    "numeric",
    "timeout",
    "internal",
)
REJECTION_REASONS = ("queue_full", "queue_timeout", "loading", "draining", "engine_restarting", "engine_dead")
CANCELLATION_PHASES = ("queued", "prefill", "decode")
CANCELLATION_CAUSES = ("disconnect", "shutdown", "timeout")
RESTART_REASONS = ("crash", "oom", "hang", "manual")
START_PHASES = ("spawn", "load")
DIRECTIONS = ("to_engine", "from_engine")
TOKEN_KINDS = ("content", "reasoning", "tool")
TOOL_CALL_OUTCOMES = ("ok", "failed")
GRAMMAR_FAILURES = {"invalid_schema": "schema", "invalid_grammar": "grammar"}
"""By the code of the error."""
STEP_PHASES = ("draft", "verify", "plain")
CACHE_RESULTS = ("hit", "partial", "miss")

_HTTP_SECONDS = (0.005, 0.025, 0.1, 0.5, 2.5, 10, 60, 300)
_QUEUE_SECONDS = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FIRST_TOKEN_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200)
_TOKEN_SECONDS = STEP_DURATION_BOUNDS_SECONDS
_GRAMMAR_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)
_PHASE_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1800)
_CANCEL_SECONDS = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_START_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_COUNTS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


class Metrics:
    """Implements `EngineObserver`; the rest of the server sets the public series directly.

    All methods are called on the event loop, except `render`, which any thread may call.
    """

    def __init__(self, *, model: str, queue_capacity: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(namespace=NAMESPACE, registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._model = model
        self._model_shown: ModelInfo | None = None
        self._build_server()
        self._build_requests(queue_capacity)
        self._build_engine()
        self._experts = ExpertMetrics(NAMESPACE, self.registry)
        self._prompt_cache = PromptCacheMetrics(NAMESPACE, self.registry)
        self._speculation = SpeculationMetrics(NAMESPACE, self.registry, model=model)

    def _build_server(self) -> None:
        self.build_info = self._gauge(
            "build_info", "Versions; always 1", "version", "system_fingerprint", "python", "arch"
        )
        self._show_build("")
        self.model_info = self._gauge(
            "model_info",
            "The served model; 1 once it is known",
            *("model", "architecture", "quantization", "ctx", "n_experts", "n_experts_used", "spec_method"),
        )
        self.device_info = self._gauge(
            "device_info",
            "What the model runs on, the CPU or every GPU that it is spread over: how many there are of this "
            "name, once it is known",
            *("device", "name", "compute_capability"),
        )
        self.http_requests = self._counter(
            "http_requests_total",
            "HTTP answers; code 499 means that the client left",
            "route",
            "method",
            "code",
        )
        # of the errors, those that an alert counts: the key is asked for before there is a route
        _touch(self.http_requests, (NO_ROUTE,), METHODS, ("401",))
        self.http_duration = self._histogram(
            "http_request_duration_seconds",
            "From the request to the end of its answer",
            _HTTP_SECONDS,
            "route",
        )

    def _build_requests(self, queue_capacity: int) -> None:
        model = [self._model]
        self.requests = self._counter(
            "requests_total", "Generation requests that ended", "model", "api", "stream", "finish"
        )
        _touch(self.requests, model, APIS, ("true", "false"), FINISHES)
        self.request_failures = self._counter("request_failures_total", "Requests that failed", "reason")
        _touch(self.request_failures, FAILURE_REASONS)
        self.requests_running = self._gauge("requests_running", "Requests in the engine")
        self.requests_waiting = self._gauge("requests_waiting", "Requests in the queue")
        self._gauge("queue_capacity", "Requests that may wait").set(queue_capacity)
        self.requests_rejected = self._counter(
            "requests_rejected_total",
            "Requests turned away before they were run, once their body had been read",
            "reason",
        )
        _touch(self.requests_rejected, REJECTION_REASONS)
        self.cancellations = self._counter(
            "request_cancellations_total", "Requests stopped before their end", "phase", "cause"
        )
        _touch(self.cancellations, CANCELLATION_PHASES, CANCELLATION_CAUSES)
        self.cancellation_duration = self._histogram(
            "cancellation_duration_seconds", "Until the engine was idle again", _CANCEL_SECONDS
        )
        self.queue_duration = self._model_histogram(
            "request_queue_duration_seconds", "Wait for the engine", _QUEUE_SECONDS
        )
        self.time_to_first_token = self._model_histogram(
            "time_to_first_token_seconds", "From the request to its first token", _FIRST_TOKEN_SECONDS
        )
        self.inter_token_latency = self._model_histogram(
            "inter_token_latency_seconds", "Between tokens, a step divided by its tokens", _TOKEN_SECONDS
        )
        self.prefill_duration = self._model_histogram(
            "prefill_duration_seconds", "Evaluation of the prompt", _PHASE_SECONDS
        )
        self.decode_duration = self._model_histogram(
            "decode_duration_seconds", "Generation of the answer", _PHASE_SECONDS
        )
        self.request_duration = self._model_histogram(
            "request_duration_seconds", "From the request to its last token", _PHASE_SECONDS
        )
        self.generated_tokens = self._counter("generated_tokens_total", "Tokens generated", "model", "kind")
        _touch(self.generated_tokens, model, TOKEN_KINDS)
        self.tool_calls = self._counter(
            "tool_call_parse_total",
            "Tool calls of answers; failed = the arguments are no JSON, as where the answer was cut",
            "outcome",
        )
        _touch(self.tool_calls, TOOL_CALL_OUTCOMES)
        self.grammar_compile_duration = self._histogram(
            "grammar_compile_duration_seconds", "Making a sampler that follows a grammar", _GRAMMAR_SECONDS
        )
        self.grammar_failures = self._counter(
            "grammar_failures_total",
            "Requests whose schema or grammar could not be followed, by what held it; not those that the "
            "check of the body's fields refused",
            "reason",
        )
        _touch(self.grammar_failures, GRAMMAR_FAILURES.values())
        self.request_prompt_tokens = self._model_histogram(
            "request_prompt_tokens", "Prompt tokens per request", _TOKEN_COUNTS
        )
        self.request_generated_tokens = self._model_histogram(
            "request_generated_tokens", "Generated tokens per request", _TOKEN_COUNTS
        )
        self.prompt_cache_lookups = self._counter(
            "prompt_cache_lookups_total",
            "Prompts looked up in the prefix cache; a hit leaves only the last token to evaluate",
            "result",
        )
        _touch(self.prompt_cache_lookups, CACHE_RESULTS)

    def _build_engine(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens", "model", "source")
        self._tokens_computed = self._prompt_tokens.labels(self._model, "computed")
        self._tokens_cached = self._prompt_tokens.labels(self._model, "cached")
        self._decode_steps = self._counter("decode_steps_total", "Decode steps of the engine")
        self._decode_seconds = self._counter("decode_step_seconds_total", "Time in decode steps")
        self._step_duration = BucketHistogram(
            f"{NAMESPACE}_decode_step_duration_seconds",
            "Evaluations of ended requests: all drafts of a step, one that verified drafts, one of a single "
            "token (nothing drafted, or no draft worth verifying)",
            STEP_DURATION_BOUNDS_SECONDS,
            {"phase": STEP_PHASES},
            self.registry,
        )
        self._prefill_seconds = self._counter("prefill_seconds_total", "Time in prefill")
        self._graph_reuses = self._counter("graph_reuses_total", "Decodes that reused the compute graph")
        self._kv_tokens = self._gauge("kv_cache_tokens", "Tokens in the KV cache")
        self._kv_capacity = self._gauge("kv_cache_capacity_tokens", "Tokens that fit the KV cache")
        self._engine_rss = self._gauge("engine_resident_memory_bytes", "Resident set of the engine process")
        self._engine_up = self._gauge("engine_up", "1 when the engine can serve or is serving")
        self._engine_state = self._gauge("engine_state", "1 for the present state", "state")
        self.on_state(EngineState.STARTING)
        self._restarts = self._counter("engine_restarts_total", "Restarts of the engine process", "reason")
        _touch(self._restarts, RESTART_REASONS)
        self._start_duration = self._histogram(
            "engine_start_duration_seconds", "Start of the engine process", _START_SECONDS, "phase"
        )
        _touch(self._start_duration, START_PHASES)
        self._heartbeat_age = self._gauge(
            "engine_heartbeat_age_seconds", "Since the engine last answered a ping; 0 before the first"
        )
        self._last_start = self._gauge(
            "engine_last_start_timestamp_seconds", "Unix time at which the engine last started; 0 = never"
        )
        self._ipc_messages = self._counter(
            "ipc_messages_total", "Messages exchanged with the engine", "direction"
        )
        self._ipc_bytes = self._counter("ipc_bytes_total", "Bytes exchanged with the engine", "direction")
        _touch(self._ipc_messages, DIRECTIONS)
        _touch(self._ipc_bytes, DIRECTIONS)
        # Once per token: plain numbers here, moved into the counters before a scrape.
        self._ipc_unseen = {direction: [0, 0] for direction in DIRECTIONS}

    def add_route(self, route: str, methods: Iterable[str]) -> None:
        """Creates the series of an HTTP route at zero."""
        for method in methods:
            self.http_requests.labels(route, method, "200")
        self.http_duration.labels(route)

    def show_engine(self, model: ModelInfo | None, *, heartbeat_age_seconds: float) -> None:
        """Sets what is not reported as an event. Called before a scrape with what the front end knows, so
        that a scrape never waits for the engine."""
        if model is not None and model is not self._model_shown:
            self._show_model(model)
        self._heartbeat_age.set(heartbeat_age_seconds)
        for direction, unseen in self._ipc_unseen.items():
            self._ipc_messages.labels(direction).inc(unseen[0])
            self._ipc_bytes.labels(direction).inc(unseen[1])
            unseen[:] = 0, 0

    def render(self) -> bytes:
        """The registry in Prometheus text format; a blocking call of some milliseconds."""
        return generate_latest(self.registry)

    # ── EngineObserver ──

    def on_state(self, state: EngineState) -> None:
        for each in EngineState:
            self._engine_state.labels(each.value).set(each is state)
        up = state in (EngineState.READY, EngineState.BUSY)
        self._engine_up.set(up)
        if state in (EngineState.RESTARTING, EngineState.DEAD):
            self._kv_tokens.set(0)
            self._engine_rss.set(0)
            self._experts.on_engine_gone()
            self._prompt_cache.on_engine_gone()
            self._speculation.on_engine_gone()

    def on_stats(self, stats: EngineStats) -> None:
        self._tokens_computed.inc(stats.prompt_tokens_computed)
        self._tokens_cached.inc(stats.prompt_tokens_cached)
        self._decode_steps.inc(stats.decode_steps)
        self._decode_seconds.inc(stats.decode_step_seconds)
        self._prefill_seconds.inc(stats.prefill_seconds)
        self._graph_reuses.inc(stats.graph_reuses)
        self._kv_tokens.set(stats.kv_cache_tokens)
        self._kv_capacity.set(stats.kv_cache_capacity_tokens)
        self._engine_rss.set(stats.rss_bytes)
        self._experts.on_stats(stats)
        self._prompt_cache.on_stats(stats)

    def on_finished(self, event: Finished | Failed) -> None:
        for phase, durations in event.timings.step_durations.items():
            if phase in STEP_PHASES and len(durations.counts) == len(STEP_DURATION_BOUNDS_SECONDS) + 1:
                self._step_duration.add(durations.counts, durations.seconds, phase)
        if event.timings.speculation is not None:
            self._speculation.on_report(event.timings.speculation)

    def on_start_phase(self, phase: str, seconds: float) -> None:
        if phase in START_PHASES:
            self._start_duration.labels(phase).observe(seconds)
        if phase == "spawn":
            self._last_start.set(time.time())

    def on_restart(self, reason: str) -> None:
        self._restarts.labels(reason if reason in RESTART_REASONS else "crash").inc()

    def on_message(self, direction: str, n_bytes: int) -> None:
        unseen = self._ipc_unseen[direction]
        unseen[0] += 1
        unseen[1] += n_bytes

    # ── helpers ──

    def _show_build(self, fingerprint: str) -> None:
        self.build_info.clear()
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        self.build_info.labels(version("s2moe"), fingerprint, python, platform.machine()).set(1)

    def _show_model(self, model: ModelInfo) -> None:
        self._model_shown = model
        self._show_build(model.system_fingerprint)
        self.model_info.clear()
        self.model_info.labels(
            self._model,
            model.architecture,
            model.quantization,
            str(model.n_ctx),
            str(model.n_expert),
            str(model.n_expert_used),
            model.speculation_method,
        ).set(1)
        self.device_info.clear()
        for device in model.devices:
            self.device_info.labels(device.kind, device.name, device.compute_capability).inc()
        self._speculation.show_model(model)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets)

    def _model_histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram with the label `model`, already bound to the one model: same type, no lookup."""
        return self._histogram(name, text, buckets, "model").labels(self._model)


def _touch(metric: Counter | Gauge | Histogram, *values: Iterable[str]) -> None:
    """Creates the children for all combinations of label values."""
    for combination in product(*values):
        metric.labels(*combination)
