"""The Prometheus series of speculative decoding, fed by the report of each request that had a speculator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from s2moe.engine.messages import CostFit, ModelInfo, SpeculationReport
from s2moe.server.speculation_names import CUSTOM_PRESET, MAX_NODES, METHODS, PRESETS
from s2moe.server.stream.speculation import acceptance_length

PHASES = ("draft", "verify", "sample", "stall")
OUTCOMES = ("drafted", "admitted", "accepted")
POSITIONS = tuple(map(str, range(MAX_NODES)))
GATINGS = ("on", "off")
ALL_PRESETS = (*PRESETS, CUSTOM_PRESET)
ROUTING_RESULTS = ("hit", "miss", "extra")
DEPTHS = tuple(map(str, range(1, MAX_NODES + 1)))
CONFIDENCE_BINS = tuple(f"0.{tenth}" for tenth in range(10))
"""Their lower bounds."""
CONTROLLER_STATES = ("drafting", "paused", "probing", "off")
OTHER_REASON = "other"
DISABLED_REASONS = ("unsupported", "error", "context_full", OTHER_REASON)
COST_TARGETS = ("verify", "draft")

_LENGTHS = tuple(range(1, MAX_NODES + 2))
_TENTHS = tuple(tenth / 10 for tenth in range(1, 11))
_DISPLACED = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.05, 0.08, 0.1, 0.16, 0.2)

Labels = Mapping[str, Sequence[str]]


class SpeculationMetrics:
    """Adds up the reports of requests. All methods are called on the event loop."""

    def __init__(self, namespace: str, registry: CollectorRegistry, *, model: str) -> None:
        """`model`: the served alias."""
        self._namespace = namespace
        self._registry = registry
        self._model = model
        self._build_acceptance()
        self._build_experts()
        self._build_controller()
        self._build_costs()

    def _build_acceptance(self) -> None:
        of_model: Labels = {"model": (self._model,), "method": METHODS}
        self._drafts = self._counter(
            "spec_decode_drafts_total", "Iterations: evaluations that verified at least one draft", of_model
        )
        self._draft_tokens = self._counter("spec_decode_draft_tokens_total", "Drafts verified", of_model)
        self._accepted_tokens = self._counter(
            "spec_decode_accepted_tokens_total", "Drafts that became part of an answer", of_model
        )
        by_position = {"position": POSITIONS}
        self._drafts_at = self._counter(
            "spec_decode_draft_tokens_per_position_total",
            "Drafts verified, by distance from the last token of the answer; 0 = next to it",
            by_position,
        )
        self._accepted_at = self._counter(
            "spec_decode_accepted_tokens_per_position_total",
            "Drafts that became part of an answer, by distance from its last token; 0 = next to it",
            by_position,
        )
        by_method = {"method": METHODS}
        self._length = self._histogram(
            "spec_decode_acceptance_length",
            "Tokens of one iteration, the target's own included",
            _LENGTHS,
            by_method,
        )
        self._request_ratio = self._histogram(
            "spec_decode_request_acceptance_ratio", "Accepted drafts of a request", _TENTHS, by_method
        )
        self._request_length = self._histogram(
            "spec_decode_request_acceptance_length",
            "Mean tokens per iteration of a request, the target's own included",
            _LENGTHS,
            by_method,
        )
        self._nodes = self._counter(
            "spec_decode_nodes_total",
            "Drafts: looked at, of them verified, of them part of an answer",
            {"outcome": OUTCOMES},
        )
        of_drafts = {"depth": DEPTHS, "bin": CONFIDENCE_BINS}
        self._confidence = self._counter(
            "spec_decode_confidence_observed_total",
            "Drafts behind an accepted prefix, by depth and predicted probability of acceptance (lower bound "
            "of a tenth)",
            {**of_drafts, "accepted": ("true", "false")},
        )
        self._expected = self._counter(
            "spec_decode_confidence_expected_total",
            "Sum of the predicted probabilities of the same drafts: so many should be accepted",
            of_drafts,
        )

    def _build_experts(self) -> None:
        self._reuse_ratio = self._histogram(
            "spec_decode_reuse_ratio",
            "Distinct experts per experts of all rows, of a request's evaluations of several rows; "
            "gating off = of the router's own choice",
            _TENTHS,
            {"gating": GATINGS},
        )
        self._displaced = self._histogram(
            "spec_decode_displaced_weight_ratio",
            "Share of a request's mixing weights that went to experts that the router would not have chosen",
            _DISPLACED,
            {"preset": ALL_PRESETS},
        )
        self._routing = self._counter(
            "spec_decode_routing_prediction_total",
            "Experts of evaluated tokens whose routing a draft had predicted, verified drafts and the token "
            "before them: predicted and chosen, chosen only, predicted only",
            {"result": ROUTING_RESULTS},
        )

    def _build_controller(self) -> None:
        self._phase_seconds = self._counter(
            "spec_decode_phase_seconds_total",
            "Time of requests with a speculator; stall is part of verify",
            {"phase": PHASES, "method": METHODS},
        )
        self._state = self._gauge(
            "spec_decode_controller_state",
            "1 for the state at the end of the latest request",
            {"state": CONTROLLER_STATES},
        )
        self._show_state("off")
        self._enabled = self._gauge("spec_decode_enabled", "1 when requests draft by default")
        self._pauses = self._counter(
            "spec_decode_pauses_total", "Times that drafting stopped since it did not pay"
        )
        self._probes = self._counter("spec_decode_probes_total", "Times that it was tried again")
        self._draft_length = self._gauge(
            "spec_decode_draft_length",
            "Mean drafts verified per drafting step at the end of the latest request with adaptive drafts",
        )
        self._disabled = self._counter(
            "spec_decode_disabled_total",
            "Requests in which drafting was switched off",
            {"reason": DISABLED_REASONS},
        )
        self._graph_builds = self._counter(
            "spec_decode_graph_builds_total", "Compute graphs built in requests with a speculator"
        )
        self._info = Gauge(
            "spec_decode_info",
            "How requests draft by default, and why not more; 1 once it is known",
            ("method", "preset", "limit"),
            namespace=self._namespace,
            registry=self._registry,
        )

    def _build_costs(self) -> None:
        by_target = {"target": COST_TARGETS}
        self._r2 = self._gauge(
            "cost_model_r2", "Fit of predicted to measured seconds, of the latest evaluations", by_target
        )
        self._mape = self._gauge(
            "cost_model_mape_ratio",
            "Mean absolute error of predicted seconds as a share of the measured ones",
            by_target,
        )
        self._fitted = self._gauge(
            "cost_model_samples", "Evaluations that the cost model was fitted to; 0 = no fit yet", by_target
        )

    def show_model(self, model: ModelInfo) -> None:
        self._enabled.set(model.speculation_method != "off")
        self._info.clear()
        self._info.labels(model.speculation_method, model.speculation_preset, model.speculation_limit).set(1)

    def on_engine_gone(self) -> None:
        """Nothing drafts; counters and what was learnt stay."""
        self._show_state("off")
        self._draft_length.set(0)

    def on_report(self, report: SpeculationReport) -> None:
        """Adds what one request did, however it ended."""
        if report.disabled_reason:
            known = report.disabled_reason in DISABLED_REASONS
            self._disabled.labels(report.disabled_reason if known else OTHER_REASON).inc()
        self._graph_builds.inc(report.n_graph_builds)
        self._add_acceptance(report)
        self._add_experts(report)
        if report.method in METHODS:
            for phase in PHASES:
                seconds = getattr(report, f"{phase}_seconds")
                # a difference of two clocks, which may come out a little below zero
                self._phase_seconds.labels(phase, report.method).inc(max(0.0, seconds))
        self._pauses.inc(max(0, report.n_pauses))
        self._probes.inc(max(0, report.n_probes))
        self._show_state(report.controller_state)
        if report.is_paced:  # the controller knows nothing of other drafts
            self._draft_length.set(report.draft_length)
        self._show_fit("verify", report.verify_fit)
        self._show_fit("draft", report.draft_fit)

    def _add_acceptance(self, report: SpeculationReport) -> None:
        if report.method in METHODS:
            self._drafts.labels(self._model, report.method).inc(report.n_iterations)
            self._draft_tokens.labels(self._model, report.method).inc(report.n_admitted)
            self._accepted_tokens.labels(self._model, report.method).inc(report.n_accepted)
            length = self._length.labels(report.method)
            for n_accepted, n_iterations in enumerate(report.acceptance_lengths):
                for _ in range(n_iterations):
                    length.observe(n_accepted + 1)
            if report.n_admitted:
                self._request_ratio.labels(report.method).observe(report.n_accepted / report.n_admitted)
            if (mean_length := acceptance_length(report)) is not None:
                self._request_length.labels(report.method).observe(mean_length)
        # shorter of the two: an engine of another version may know fewer or more depths
        for position, count in zip(POSITIONS, report.admitted_by_depth, strict=False):
            self._drafts_at.labels(position).inc(count)
        for position, count in zip(POSITIONS, report.accepted_by_depth, strict=False):
            self._accepted_at.labels(position).inc(count)
        for outcome in OUTCOMES:
            self._nodes.labels(outcome).inc(getattr(report, f"n_{outcome}"))
        for depth, tenths in zip(DEPTHS, report.judged_drafts, strict=False):
            for lower, (count, n_accepted, expected) in zip(CONFIDENCE_BINS, tenths, strict=False):
                if count:
                    self._confidence.labels(depth, lower, "true").inc(n_accepted)
                    self._confidence.labels(depth, lower, "false").inc(max(0, count - n_accepted))
                    self._expected.labels(depth, lower).inc(expected)

    def _add_experts(self, report: SpeculationReport) -> None:
        if report.n_row_experts:
            self._reuse_ratio.labels("on").observe(report.n_touched_multi / report.n_row_experts)
            self._reuse_ratio.labels("off").observe(report.n_exact_multi / report.n_row_experts)
        if report.n_token_layers and report.preset in ALL_PRESETS:
            share = report.displaced_weight / report.n_token_layers
            self._displaced.labels(report.preset).observe(share)
        self._routing.labels("hit").inc(report.routing_hits)
        self._routing.labels("miss").inc(report.routing_misses)
        self._routing.labels("extra").inc(report.routing_extra)

    def _show_state(self, state: str) -> None:
        for each in CONTROLLER_STATES:
            self._state.labels(each).set(each == state)

    def _show_fit(self, target: str, fit: CostFit) -> None:
        if fit.n:  # a request that drafted nothing says nothing of it
            self._r2.labels(target).set(fit.r2)
            self._mape.labels(target).set(fit.mape)
            self._fitted.labels(target).set(fit.n)

    def _counter(self, name: str, text: str, labels: Labels | None = None) -> Counter:
        counter = Counter(name, text, tuple(labels or ()), namespace=self._namespace, registry=self._registry)
        _touch(counter, labels)
        return counter

    def _gauge(self, name: str, text: str, labels: Labels | None = None) -> Gauge:
        gauge = Gauge(name, text, tuple(labels or ()), namespace=self._namespace, registry=self._registry)
        _touch(gauge, labels)
        return gauge

    def _histogram(self, name: str, text: str, buckets: Sequence[float], labels: Labels) -> Histogram:
        histogram = Histogram(
            name, text, tuple(labels), namespace=self._namespace, registry=self._registry, buckets=buckets
        )
        _touch(histogram, labels)
        return histogram


def _touch(metric: Counter | Gauge | Histogram, labels: Labels | None) -> None:
    """Creates the children for all combinations of label values, at zero."""
    for values in product(*labels.values()) if labels else ():
        metric.labels(*values)
