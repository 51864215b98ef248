"""What one generation request leaves in the metrics and in the log."""

from __future__ import annotations

import time

import msgspec

from s2moe.engine.messages import Finished, GenerationEvent, Started, Step
from s2moe.server.errors import ApiError
from s2moe.server.metrics import GRAMMAR_FAILURES, REJECTION_REASONS, Metrics
from s2moe.server.stream.tool_calls import ToolCalls

_FAILURE_REASONS = {
    "context_length_exceeded": "context_length",
    "invalid_schema": "bad_schema",
    "invalid_grammar": "bad_schema",
    "template_error": "template",
    "insufficient_memory": "oom",
    "engine_died": "engine_died",
    "model_file_error": "model_file",
    "numeric_error": "numeric",
}
_ENGINE_ENDS = ("stop", "length", "tool_calls")


class RequestRecorder:
    """Follows one HTTP request from admission to its end. `phase` is queued, prefill or decode: once the
    first of several choices decodes, it stays decode.

    Exactly one of `finished`, `failed` and `cancelled` ends it.
    """

    def __init__(self, metrics: Metrics, *, model: str, api: str, stream: bool) -> None:
        self._metrics = metrics
        self._labels = (model, api, "true" if stream else "false")
        self._content_tokens = metrics.generated_tokens.labels(model, "content")
        self._reasoning_tokens = metrics.generated_tokens.labels(model, "reasoning")
        self._tool_tokens = metrics.generated_tokens.labels(model, "tool")
        self._arrived = time.monotonic()
        self._decode_began = 0.0
        self._last_step = 0.0
        self._step_seconds: float | None = None
        self._step_tokens = 0
        self._sampled_ns = 0
        self._n_content_tokens = 0
        self._n_reasoning_tokens = 0
        self._n_tool_tokens = 0
        self._calls = ToolCalls()
        self.phase = "queued"
        self.n_prompt_tokens = 0
        self.finish: str | None = None
        self._is_last_choice = True
        self._n_counted_tokens = 0

    @property
    def n_generated_tokens(self) -> int:
        return self._n_content_tokens + self._n_reasoning_tokens + self._n_tool_tokens

    @property
    def generation_began(self) -> bool:
        return self.phase == "decode"

    def admitted(self) -> None:
        self._metrics.queue_duration.observe(time.monotonic() - self._arrived)
        self.phase = "prefill"

    def begin_choice(self, *, is_last: bool) -> None:
        """Another answer to the same request begins; the request ends with the last one."""
        self._is_last_choice = is_last
        self._n_counted_tokens = self.n_generated_tokens

    def on_event(self, event: GenerationEvent) -> None:
        if isinstance(event, Step):
            self._on_step(event)
        elif isinstance(event, Started):
            self._on_started(event)
        elif isinstance(event, Finished):
            self._on_finished(event)

    def failed(self, error: ApiError) -> None:
        if self.finish is not None:
            return
        if self.phase == "queued" and error.code in REJECTION_REASONS:
            self._metrics.requests_rejected.labels(error.code).inc()
            self.finish = "rejected"
            return
        self._count_failure(error)
        self._end("error")

    def not_written(self, error: ApiError) -> None:
        """The client got `error` instead of the answer, or of its end. A failure even where the engine's own
        end of the request has been counted."""
        if self.finish in _ENGINE_ENDS:
            self._count_failure(error)
        else:
            self.failed(error)

    def _count_failure(self, error: ApiError) -> None:
        if error.code in _FAILURE_REASONS:
            reason = _FAILURE_REASONS[error.code]
        elif error.status == 503:
            reason = "unavailable"
        else:
            reason = "invalid_request" if error.status < 500 else "internal"
        self._metrics.request_failures.labels(reason).inc()
        if error.code in GRAMMAR_FAILURES:
            self._metrics.grammar_failures.labels(GRAMMAR_FAILURES[error.code]).inc()

    def cancelled(self, cause: str, seconds: float) -> None:
        """`seconds`: from the wish to stop until the engine was idle."""
        if self.finish is not None:
            return
        self._metrics.cancellations.labels(self.phase, cause).inc()
        self._metrics.cancellation_duration.observe(seconds)
        if cause == "timeout":
            self._metrics.request_failures.labels("timeout").inc()
            self._end("error")
        else:
            self._end("cancelled")

    def _on_started(self, event: Started) -> None:
        self.n_prompt_tokens = event.n_prompt_tokens
        self._metrics.request_prompt_tokens.observe(event.n_prompt_tokens)
        if event.n_cached_tokens == 0:
            result = "miss"
        else:
            result = "hit" if event.n_cached_tokens >= event.n_prompt_tokens - 1 else "partial"
        self._metrics.prompt_cache_lookups.labels(result).inc()

    def _on_step(self, event: Step) -> None:
        now = time.monotonic()
        n_tokens = event.n_tokens
        if self.phase != "decode":
            self.phase = "decode"
            self._decode_began = now
            self._last_step = now
            self._metrics.time_to_first_token.observe(now - self._arrived)
        elif event.sampled_ns == 0 or event.sampled_ns != self._sampled_ns:
            self._observe_step()
            self._step_seconds = now - self._last_step
            self._last_step = now
        self._sampled_ns = event.sampled_ns
        self._step_tokens += n_tokens
        if event.tool_calls:
            self._calls.add(event.tool_calls)
            self._n_tool_tokens += n_tokens
            self._tool_tokens.inc(n_tokens)
        elif event.content or not event.reasoning:
            self._n_content_tokens += n_tokens
            self._content_tokens.inc(n_tokens)
        else:
            self._n_reasoning_tokens += n_tokens
            self._reasoning_tokens.inc(n_tokens)

    def _count_calls(self) -> None:
        for arguments in self._calls.arguments:
            self._metrics.tool_calls.labels("ok" if _is_json(arguments) else "failed").inc()
        self._calls = ToolCalls()

    def _observe_step(self) -> None:
        """Shares the time of a step among its tokens, which may have come in several events. Those of the
        first step waited for the prompt and are no measure of decoding."""
        if self._step_seconds is not None:
            for _ in range(self._step_tokens):
                self._metrics.inter_token_latency.observe(self._step_seconds / self._step_tokens)
        self._step_seconds = None
        self._step_tokens = 0

    def _on_finished(self, event: Finished) -> None:
        self._count_calls()
        # Tokens that released no text (end of turn, a removed stop string) were in no step.
        rest = event.n_completion_tokens - (self.n_generated_tokens - self._n_counted_tokens)
        if rest > 0:
            self._n_content_tokens += rest
            self._content_tokens.inc(rest)
        self._metrics.request_generated_tokens.observe(event.n_completion_tokens)
        self._metrics.prefill_duration.observe(event.timings.prefill_seconds)
        self._metrics.decode_duration.observe(event.timings.decode_seconds)
        if event.timings.grammar_seconds > 0:
            self._metrics.grammar_compile_duration.observe(event.timings.grammar_seconds)
        if self._is_last_choice:
            self._metrics.request_duration.observe(time.monotonic() - self._arrived)
            if event.reason != "cancelled" and self.finish is None:
                self._end(event.reason)

    def _end(self, finish: str) -> None:
        self.finish = finish
        self._observe_step()
        self._metrics.requests.labels(*self._labels, finish).inc()


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True
