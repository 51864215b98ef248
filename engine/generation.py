"""One request, from messages to the last token."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from s2moe.engine.decoder import Decoder, create_decoder
from s2moe.engine.errors import RequestAbortedError, RequestError
from s2moe.engine.expert_stats import UseMeter
from s2moe.engine.messages import (
    ExpertUse,
    Finished,
    Generate,
    GenerationEvent,
    PrefillProgress,
    Sampling,
    Started,
    Step,
    Timings,
)
from s2moe.engine.model import Model
from s2moe.engine.native import NativeAnswerParser, NativeError, Sampler, Status
from s2moe.engine.stream.answer import AnswerStream, ContentOnly, Delta

CONTENT_ONLY = "content-only"


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
        self.prefill_experts: ExpertUse | None = None
        self.decode_experts: ExpertUse | None = None
        self._n_unsent_tokens = 0
        self._decoder: Decoder | None = None

    def run(self) -> Iterator[GenerationEvent]:
        """Yields Started, PrefillProgress, Step and, last, Finished.

        Raises RequestError when the request cannot be answered. The KV cache is consistent at every yield and
        after every exception.
        """
        try:
            chat = self._apply_template()
            self._check_abort()
            prompt = self._tokenize_prompt(chat)
            self._check_abort()
            yield from self._answer(chat, prompt)
        except RequestAbortedError:
            yield self._finished("cancelled", None)

    def _answer(self, chat: dict[str, Any], prompt: list[int]) -> Iterator[GenerationEvent]:
        sampler = self._create_sampler()
        try:
            decoder = self._decoder = create_decoder(self._model, self._request, sampler)
            parser = self._create_parser(chat)
            try:
                stream = AnswerStream([*self._request.stop, *chat["stops"]], parser)
                yield from self._prefill(prompt, exact=decoder.is_exact)
                sampler.accept_prompt(prompt)
                yield from self._decode(decoder, stream, self._visible_specials(chat))
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

    def _check_length(self, n_prompt_tokens: int, *, at_least: bool = False) -> None:
        n_ctx = self._model.n_ctx
        if n_prompt_tokens < n_ctx:
            return
        count = f"at least {n_prompt_tokens}" if at_least else str(n_prompt_tokens)
        raise RequestError(
            "context_length_exceeded",
            f"This model's maximum context length is {n_ctx} tokens, but the messages have {count} "
            "tokens and leave no room for an answer. Shorten them or serve with a larger --ctx-size.",
            param="messages",
            n_prompt_tokens=n_prompt_tokens,
            n_ctx=n_ctx,
        )

    def _apply_template(self) -> dict[str, Any]:
        try:
            messages = json.loads(self._request.messages_json)
            n_bytes = sum(len(message["content"].encode()) for message in messages)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(
                "invalid_value", "messages are not a list of chat messages with text", param="messages"
            ) from error
        self._check_length(self._model.min_token_count(n_bytes), at_least=True)
        request = b'{"messages":%b}' % self._request.messages_json
        try:
            self._chat_json = self._model.chat_template.apply(request)
        except NativeError as error:
            code = "template_error" if error.status == Status.TEMPLATE else "invalid_value"
            raise RequestError(
                code, f"the chat template refuses the messages: {error.message}", param="messages"
            ) from error
        chat: dict[str, Any] = json.loads(self._chat_json)
        return chat

    def _tokenize_prompt(self, chat: dict[str, Any]) -> list[int]:
        prompt = self._model.tokenize(chat["prompt"])
        self.n_prompt_tokens = len(prompt)
        if not prompt:
            raise RequestError("invalid_value", "the prompt has no tokens", param="messages")
        self._check_length(len(prompt))
        return prompt

    def _create_sampler(self) -> Sampler:
        params = sampling_params(self._request.sampling)
        try:
            return Sampler(self._model.library, self._model.handle, params)
        except NativeError as error:
            if error.status == Status.GRAMMAR:
                raise RequestError("invalid_grammar", error.message, param="grammar") from error
            # libs2moe begins its message with the key that it rejects
            key = error.message.partition(" ")[0]
            param = key if key in params else None
            code = "insufficient_memory" if error.status == Status.NO_MEMORY else "invalid_value"
            raise RequestError(code, error.message, param=param) from error

    def _create_parser(self, chat: dict[str, Any]) -> NativeAnswerParser | ContentOnly:
        if chat["format"] == CONTENT_ONLY:
            return ContentOnly()
        return NativeAnswerParser(self._model.library, self._chat_json)

    def _visible_specials(self, chat: dict[str, Any]) -> frozenset[int]:
        """Control tokens whose text the parser needs to see."""
        ids = (self._model.control_token(text) for text in chat["preserved_tokens"])
        return frozenset(token for token in ids if token is not None)

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
        model = self._model
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
                for token in tokens:
                    self.n_completion_tokens += 1
                    self._n_unsent_tokens += 1
                    if model.is_end(token):
                        reason = "stop"
                        break
                    delta = stream.feed(model.piece(token, special=token in visible_specials))
                    if delta.content or delta.reasoning:
                        yield self._step(delta, sampled_ns)
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
        delta = stream.finish()
        if delta.content or delta.reasoning or self._n_unsent_tokens:
            yield self._step(delta, sampled_ns)
        yield self._finished(reason, stream.stop_string)

    # events

    def _step(self, delta: Delta, sampled_ns: int) -> Step:
        n_tokens, self._n_unsent_tokens = self._n_unsent_tokens, 0
        if delta.reasoning and not delta.content:
            self.n_reasoning_tokens += n_tokens
        return Step(
            request_id=self._request.request_id,
            content=delta.content,
            reasoning=delta.reasoning,
            n_tokens=n_tokens,
            sampled_ns=sampled_ns,
        )

    def _finished(self, reason: str, stop_string: str | None) -> Finished:
        return Finished(
            request_id=self._request.request_id,
            reason=reason,
            n_prompt_tokens=self.n_prompt_tokens,
            n_cached_tokens=self.n_cached_tokens,
            n_completion_tokens=self.n_completion_tokens,
            n_reasoning_tokens=self.n_reasoning_tokens,
            timings=Timings(
                prefill_seconds=self.prefill_seconds,
                decode_seconds=self.decode_seconds,
                n_decode_steps=self.n_decode_steps,
                prefill_experts=self.prefill_experts,
                decode_experts=self.decode_experts,
                speculation=None if self._decoder is None else self._decoder.report(),
            ),
            stop_string=stop_string,
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
