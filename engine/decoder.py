"""Where the tokens of one answer come from: one decode each, or steps that draft and verify."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from s2moe.engine.constraint import Constraint
from s2moe.engine.errors import RequestAbortedError, RequestError
from s2moe.engine.messages import Generate, SpeculationReport, StepDurations
from s2moe.engine.model import Model
from s2moe.engine.native import NativeError, Sampler, Status
from s2moe.engine.native_speculation import Speculator
from s2moe.engine.speculation import (
    EXPERT_SKIP,
    OFF,
    UNSUPPORTED,
    has_own_context,
    merge,
    refused,
    report_to_wire,
)
from s2moe.engine.step_durations import StepDurationCounter, durations_of_report

logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """Continues the KV cache, whose last logits are those of the prompt. One for each answer."""

    n_steps: int
    """Evaluations of the target model so far."""
    is_exact: bool
    """Whether the answer must be the one that the model gives alone."""

    def next_tokens(self, n_max: int) -> list[int]:
        """The next 1 … n_max tokens, as many as come at once. An answer that ends with one of them drops the
        rest, which the KV cache holds all the same.

        Raises RequestAbortedError and RequestError; the KV cache is then as before.
        """
        ...

    def rows(self) -> list[int]:
        """For each of the tokens that came last, the index of the logits that chose it. They stay valid until
        the next call of next_tokens()."""
        ...

    def report(self) -> SpeculationReport | None:
        """What speculation did; None where none was asked for."""
        ...

    def step_durations(self) -> dict[str, StepDurations]:
        """How long evaluations took, by the phases of Timings.step_durations."""
        ...


class PlainDecoder:
    """One token per decode."""

    def __init__(
        self, model: Model, sampler: Sampler, constraint: Constraint | None, *, disabled_reason: str = ""
    ) -> None:
        """`disabled_reason`: why there is no speculation though the request asks for it."""
        self._model = model
        self._sampler = sampler
        self._constraint = constraint
        self._disabled_reason = disabled_reason
        self._last: int | None = None
        self._durations = StepDurationCounter()
        self.n_steps = 0
        self.is_exact = True

    def next_tokens(self, n_max: int) -> list[int]:
        if self._last is not None:
            started = time.perf_counter()
            self._model.decode([self._last])
            self._durations.add(time.perf_counter() - started)
            self.n_steps += 1
        self._last = self._sample()
        return [self._last]

    def rows(self) -> list[int]:
        return [-1]

    def after(self, token: int) -> int:
        """Evaluates `token` and returns the next."""
        self._last = token
        return self.next_tokens(1)[0]

    def _sample(self) -> int:
        try:
            return self._sampler.sample(self._model.context)
        except NativeError as error:
            if error.status == Status.ABORTED:
                raise RequestAbortedError from error
            if self._constraint is not None:
                # a grammar that cannot be followed says so itself, and what to do
                is_grammar = error.status == Status.GRAMMAR
                why = "" if is_grammar else "the grammar allows no further token: "
                raise self._constraint.refused(why + error.message) from error
            raise RequestError("internal", f"sampling failed: {error.message}") from error

    def report(self) -> SpeculationReport | None:
        if not self._disabled_reason:
            return None
        return SpeculationReport(
            disabled_reason=self._disabled_reason, n_steps=self.n_steps, n_tokens=self.n_steps
        )

    def step_durations(self) -> dict[str, StepDurations]:
        return {"plain": self._durations.result()}


class SpeculativeDecoder:
    """Steps of a speculator."""

    def __init__(
        self,
        model: Model,
        speculator: Speculator,
        sampler: Sampler,
        options: dict[str, Any],
        constraint: Constraint | None,
    ) -> None:
        """Raises NativeError as Speculator.begin()."""
        self._model = model
        self._speculator = speculator
        self._sampler = sampler
        self._options = options
        self._constraint = constraint
        self._keeps_bits = options["method"] != EXPERT_SKIP
        self._plain = PlainDecoder(model, sampler, constraint)
        self._last: int | None = None
        self._is_plain_step = True
        self.n_steps = 0
        speculator.begin(options)
        self._report_before = speculator.report()
        self.is_exact = self._report_before["error_budget"] == 0

    def next_tokens(self, n_max: int) -> list[int]:
        if self._last is None:
            # counters start here, not before the prompt, whose options had to be checked first
            self._speculator.begin(self._options)
            if has_own_context(self._options):
                self._speculator.feed(self._model.kv_tokens)
            tokens = self._plain.next_tokens(1)
        else:
            tokens = self._step(self._last, n_max)
            self.n_steps += 1
        self._last = tokens[-1]
        return tokens

    def rows(self) -> list[int]:
        if self._is_plain_step:
            return self._plain.rows()
        return [row.logits_index for row in self._speculator.rows()]

    def _step(self, root: int, n_max: int) -> list[int]:
        try:
            tokens = self._model.speculate(
                self._speculator,
                self._sampler,
                root,
                n_max,
                is_retried=self._constraint is not None,
                keeps_bits=self._keeps_bits,
            )
            self._is_plain_step = False
            return tokens
        except RequestError as error:
            if error.code != "internal" or self._constraint is None:
                raise
            self._is_plain_step = True
            # the grammar may be at its end within the step: what a token at a time makes of it, counts
            logger.debug("a step of speculation failed, one token is decoded plainly: %s", error.message)
            token = self._plain.after(root)
            if has_own_context(self._options):
                self._speculator.feed(self._model.kv_tokens)
            return [token]

    def report(self) -> SpeculationReport | None:
        report = self._speculator.report()
        if detail := report.get("disabled_detail"):
            logger.warning("the response went on without speculation: %s", detail)
        return report_to_wire(report, self._report_before)

    def step_durations(self) -> dict[str, StepDurations]:
        return durations_of_report(self._speculator.report(), self._plain.step_durations()["plain"])


def create_decoder(
    model: Model, request: Generate, sampler: Sampler, constraint: Constraint | None
) -> Decoder:
    """The decoder for what request and server ask for, and the model allows.

    Raises RequestError when the request's options are out of their domain, or not those of this server.
    """
    options = merge(model.speculation.asked, request.speculation)
    if options["method"] == OFF:
        return PlainDecoder(model, sampler, constraint)
    model.speculation.check(options)
    if model.speculator is not None:
        try:
            return SpeculativeDecoder(model, model.speculator, sampler, options, constraint)
        except NativeError as error:
            if error.status == Status.INVALID:
                raise refused(error.message) from error
            if error.status != Status.UNSUPPORTED:
                raise
    return PlainDecoder(model, sampler, constraint, disabled_reason=UNSUPPORTED)
