"""One request, from messages to the last token."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, Final

from s2moe.engine.decoder import Decoder, create_decoder
from s2moe.engine.errors import RequestAbortedError, RequestError
from s2moe.engine.expert_stats import UseMeter
from s2moe.engine.logprobs import LogprobReader
from s2moe.engine.messages import (
    ExpertUse,
    Finished,
    Generate,
    GenerationEvent,
    PrefillProgress,
    Sampling,
    SpeculationReport,
    Started,
    Step,
    StepDurations,
    Timings,
    TokenLogprob,
)
from s2moe.engine.model import Model
from s2moe.engine.native import NativeAnswerParser, NativeError, Sampler, Status
from s2moe.engine.prompt import Prompt, read_prompt
from s2moe.engine.stream.answer import AnswerStream, ContentOnly, Delta
from s2moe.engine.stream.token_ledger import TokenLedger
from s2moe.engine.tool_calls import ToolCalls

logger = logging.getLogger(__name__)

NEVER: Final = -1e9
"""A bias that no logit outweighs, and that leaves other tokens their probabilities."""


class Generation:
    """A request being answered; `run()` yields its events and keeps the counters current."""

    def __init__(self, model: Model, request: Generate) -> None:
        self._model = model
        self._request = request
        self.phase = "prefill"
        self.n_prompt_tokens = 0
        self.n_cached_tokens = 0
        self.n_evaluated_prompt_tokens = 0
        self.n_completion_tokens = 0
        self.n_reasoning_tokens = 0
        self.n_decode_steps = 0
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.grammar_seconds = 0.0
        self.prefill_experts: ExpertUse | None = None
        self.decode_experts: ExpertUse | None = None
        self._ledger = TokenLedger()
        self._tool_calls = ToolCalls(request.messages_json, own_ids=request.own_call_ids)
        self._is_thinking = False
        """Whether what was released last is reasoning."""
        self._decoder: Decoder | None = None
        self._logprobs: LogprobReader | None = None

    def run(self) -> Iterator[GenerationEvent]:
        """Yields Started, PrefillProgress, Step and, last, Finished.

        Raises RequestError when the request cannot be answered. The KV cache is consistent at every yield and
        after every exception.
        """
        try:
            self._check_limits()
            prompt = read_prompt(self._model, self._request)
            self._check_abort()
            tokens = prompt.tokenize(self._model.vocabulary)
            self.n_prompt_tokens = len(tokens)
            self._check_abort()
            yield from self._answer(prompt, tokens)
        except RequestAbortedError:
            yield self._finished("cancelled", None)

    def _answer(self, prompt: Prompt, tokens: list[int]) -> Iterator[GenerationEvent]:
        sampler = self._create_sampler(prompt)
        try:
            decoder = self._decoder = create_decoder(self._model, self._request, sampler, prompt.constraint)
            parser = self._create_parser(prompt)
            try:
                stream = AnswerStream([*self._request.stop, *prompt.stops], parser)
                yield from self._prefill(tokens, exact=decoder.is_exact)
                sampler.accept_prompt(tokens)
                yield from self._decode(decoder, stream, self._visible_specials(prompt))
            finally:
                if isinstance(parser, NativeAnswerParser):
                    parser.close()
        finally:
            sampler.close()

    # preparation

    def _check_abort(self) -> None:
        """Between steps that a native abort cannot reach."""
        if self._model.abort.requested:
            raise RequestAbortedError

    def _check_limits(self) -> None:
        if self._request.max_tokens is not None and self._request.max_tokens < 1:
            raise RequestError("invalid_value", "max_tokens must be at least 1", param="max_tokens")
        if (n_top := self._request.n_top_logprobs) is not None:
            model = self._model
            self._logprobs = LogprobReader(model.library, model.context, model.vocabulary, n_top)

    def _create_sampler(self, prompt: Prompt) -> Sampler:
        params = sampling_params(self._request.sampling)
        if self._request.ignore_eos:
            params.setdefault("logit_bias", [])
            params["logit_bias"] += [[token, NEVER] for token in self._model.vocabulary.ends]
        if prompt.constraint is not None:
            params.update(prompt.constraint.params)
        started = time.monotonic()
        try:
            sampler = Sampler(self._model.library, self._model.handle, params, self._model.abort)
            if prompt.constraint is not None:
                self.grammar_seconds = time.monotonic() - started
            return sampler
        except NativeError as error:
            if error.status == Status.ABORTED:
                raise RequestAbortedError from error
            if error.status == Status.GRAMMAR and prompt.constraint is not None:
                raise prompt.constraint.refused(error.message) from error
            # libs2moe begins its message with the key that it rejects
            key = error.message.partition(" ")[0]
            param = key if key in params else None
            code = "insufficient_memory" if error.status == Status.NO_MEMORY else "invalid_value"
            raise RequestError(code, error.message, param=param) from error

    def _create_parser(self, prompt: Prompt) -> NativeAnswerParser | ContentOnly:
        if prompt.chat_json is None:
            return ContentOnly()
        return NativeAnswerParser(self._model.library, prompt.chat_json)

    def _visible_specials(self, prompt: Prompt) -> frozenset[int]:
        """Tokens whose text the parser needs to see if they are control tokens."""
        tokenize = self._model.vocabulary.tokenize
        return frozenset(
            token
            for text in prompt.preserved_tokens
            for token in tokenize(text, add_special=False, parse_special=True)
        )

    # the two phases

    def _prefill(self, prompt: list[int], *, exact: bool) -> Iterator[GenerationEvent]:
        model = self._model
        self.n_cached_tokens = model.reuse_prefix(prompt, exact=exact)
        yield Started(
            request_id=self._request.request_id,
            n_prompt_tokens=len(prompt),
            n_cached_tokens=self.n_cached_tokens,
        )
        meter = UseMeter(model.experts)
        started = time.monotonic()
        try:
            for begin in range(self.n_cached_tokens, len(prompt), model.n_batch):
                chunk = prompt[begin : begin + model.n_batch]
                model.decode(chunk)
                self.n_evaluated_prompt_tokens += len(chunk)
                self.prefill_seconds = time.monotonic() - started
                yield PrefillProgress(request_id=self._request.request_id, n_done_tokens=begin + len(chunk))
        finally:
            self.prefill_seconds = time.monotonic() - started
            self.prefill_experts = meter.read()

    def _decode(
        self, decoder: Decoder, stream: AnswerStream, visible_specials: frozenset[int]
    ) -> Iterator[GenerationEvent]:
        model, vocabulary = self._model, self._model.vocabulary
        self.phase = "decode"
        n_max = model.n_ctx - self.n_prompt_tokens
        if self._request.max_tokens is not None:
            n_max = min(n_max, self._request.max_tokens)
        meter = UseMeter(model.experts)
        started = time.monotonic()
        try:
            reason = ""
            while not reason:
                tokens = decoder.next_tokens(n_max - self.n_completion_tokens)
                sampled_ns = time.monotonic_ns()
                self.n_decode_steps = decoder.n_steps
                self.decode_seconds = time.monotonic() - started
                rows = decoder.rows() if self._logprobs is not None else []
                for place, token in enumerate(tokens):
                    self.n_completion_tokens += 1
                    if vocabulary.is_end(token):
                        self._ledger.add(stream.n_characters)
                        reason = "stop"
                        break
                    piece = vocabulary.piece(token, special=token in visible_specials)
                    logprob = None if self._logprobs is None else self._logprobs.read(rows[place], token)
                    if piece:
                        self._ledger.add(stream.n_characters, logprob)
                    else:
                        self._ledger.add_control(stream.n_begun, logprob)
                    delta = stream.feed(piece)
                    if delta.content or delta.reasoning or delta.tool_calls:
                        yield self._step(delta, sampled_ns, *self._ledger.take(stream.n_passed))
                    if stream.stop_string is not None:
                        reason = "stop"
                        break
                    if self.n_completion_tokens >= n_max:
                        reason = "length"
                        break
        finally:
            self.n_decode_steps = decoder.n_steps
            self.decode_seconds = time.monotonic() - started
            self.decode_experts = meter.read()
        yield from self._end(stream, reason, sampled_ns)

    def _end(self, stream: AnswerStream, reason: str, sampled_ns: int) -> Iterator[GenerationEvent]:
        delta = stream.finish()
        stop = stream.stop_string
        n_tokens, logprobs = (
            self._ledger.take_all() if stop is None else self._ledger.take_stopped(stream.n_passed)
        )
        if delta.content or delta.reasoning or delta.tool_calls or n_tokens:
            yield self._step(delta, sampled_ns, n_tokens, logprobs)
        # a stop string of the template is the model's own way to end its turn
        own_stop = stop if stop in self._request.stop else None
        calls = self._tool_calls
        # agents go on only at this reason, and behind a whole call nothing is lost by a stop string
        if reason == "stop" and (calls.is_complete if own_stop is not None else calls.n_calls):
            reason = "tool_calls"
        yield self._finished(reason, own_stop)

    # events

    def _step(self, delta: Delta, sampled_ns: int, n_tokens: int, logprobs: list[TokenLogprob]) -> Step:
        if delta.content or delta.tool_calls:
            self._is_thinking = False
        elif delta.reasoning:
            self._is_thinking = True
        if self._is_thinking:
            self.n_reasoning_tokens += n_tokens
        return Step(
            request_id=self._request.request_id,
            content=delta.content,
            reasoning=delta.reasoning,
            n_tokens=n_tokens,
            sampled_ns=sampled_ns,
            tool_calls=self._tool_calls.complete(delta.tool_calls),
            logprobs=logprobs,
        )

    def _finished(self, reason: str, stop_string: str | None) -> Finished:
        return Finished(
            request_id=self._request.request_id,
            reason=reason,
            n_prompt_tokens=self.n_prompt_tokens,
            n_cached_tokens=self.n_cached_tokens,
            n_completion_tokens=self.n_completion_tokens,
            n_reasoning_tokens=self.n_reasoning_tokens,
            timings=self.timings(),
            stop_string=stop_string,
        )

    def timings(self) -> Timings:
        """So far. Never raises: an answer must not fail for its figures."""
        speculation: SpeculationReport | None = None
        step_durations: dict[str, StepDurations] = {}
        if self._decoder is not None:
            try:
                speculation, step_durations = self._decoder.report(), self._decoder.step_durations()
            except Exception:
                logger.exception("request %s: what its steps did is not known", self._request.request_id)
        return Timings(
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            grammar_seconds=self.grammar_seconds,
            n_decode_steps=self.n_decode_steps,
            prefill_experts=self.prefill_experts,
            decode_experts=self.decode_experts,
            speculation=speculation,
            step_durations=step_durations,
        )


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """The JSON object of s2moe_sampler_create(): what the request leaves open is left out."""
    params: dict[str, Any] = {
        name: value
        for name in sampling.__struct_fields__
        if name != "logit_bias" and (value := getattr(sampling, name)) is not None
    }
    if sampling.logit_bias:
        params["logit_bias"] = [[token, bias] for token, bias in sampling.logit_bias.items()]
    return params
