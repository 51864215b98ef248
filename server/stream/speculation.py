"""The engine's report of one request → the answer's object `speculation`, and keys of `timings`."""

from __future__ import annotations

from typing import Any, Final

from s2moe.engine.messages import SpeculationReport

EXPERT_SKIP: Final = "expert-skip"


def ratio(numerator: float, denominator: float) -> float | None:
    """None where there is nothing to divide by: JSON has no NaN, and 0 would be a claim."""
    return numerator / denominator if denominator else None


def speculation_of(report: SpeculationReport) -> dict[str, Any]:
    """The fields of `schema.speculation.Speculation`."""
    followed_router = report.n_biased_rows == 0 and (report.error_budget == 0 or report.method == "off")
    # expert-skip verifies wider batches than kernels compute as single rows
    exact = followed_router and report.method != EXPERT_SKIP
    return {
        "method": report.method,
        "preset": report.preset or None,
        "exact": exact,
        "disabled_reason": report.disabled_reason or None,
        "iterations": report.n_iterations,
        "steps": report.n_steps,
        "drafted": report.n_drafted,
        "admitted": report.n_admitted,
        "accepted": report.n_accepted,
        "acceptance_rate": ratio(report.n_accepted, report.n_admitted),
        "acceptance_length": acceptance_length(report),
        "mean_tokens_per_step": ratio(report.n_tokens, report.n_steps),
        "admitted_by_depth": report.admitted_by_depth,
        "accepted_by_depth": report.accepted_by_depth,
        "acceptance_histogram": report.acceptance_lengths,
        "reuse_ratio": ratio(report.n_touched_multi, report.n_row_experts),
        "reuse_ratio_ungated": ratio(report.n_exact_multi, report.n_row_experts),
        "experts_touched": report.n_experts_touched,
        "misses_avoided": report.n_missing_exact - report.n_missing,
        "displaced_weight": ratio(report.displaced_weight, report.n_token_layers),
        "error_budget": report.error_budget,
        "biased_rows": ratio(report.n_biased_rows, report.n_committed_rows),
        "draft_seconds": report.draft_seconds,
        "verify_seconds": report.verify_seconds,
        "sample_seconds": report.sample_seconds,
        "stall_seconds": report.stall_seconds,
        "controller_state": report.controller_state,
        "graph_builds": report.n_graph_builds,
    }


def acceptance_length(report: SpeculationReport) -> float | None:
    """Mean tokens per iteration, the target's own included."""
    return 1 + report.n_accepted / report.n_iterations if report.n_iterations else None


def draft_counts_of(report: SpeculationReport | None) -> dict[str, int]:
    """llama-server's keys, which it too leaves out of answers without drafts."""
    if report is None or (report.method == "off" and not report.n_admitted):
        return {}
    return {"draft_n": report.n_admitted, "draft_n_accepted": report.n_accepted}
