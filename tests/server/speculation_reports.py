"""A report of a request with drafts, made of numbers that are told apart."""

from __future__ import annotations

from s2moe.engine.messages import CostFit, SpeculationReport

NONE_JUDGED = (0, 0, 0.0)
JUDGED = [
    [(0, 0, 0.0), (2, 0, 0.25), *[NONE_JUDGED] * 5, (4, 3, 3.0), (0, 0, 0.0), (3, 3, 2.75)],
    [*[NONE_JUDGED] * 7, (2, 1, 1.5), (5, 4, 4.25), NONE_JUDGED],
    *[[NONE_JUDGED] * 10 for _ in range(5)],
]
REPORT = SpeculationReport(
    method="s2moe",
    preset="balanced",
    n_steps=20,
    n_iterations=8,
    n_tokens=32,
    n_drafted=40,
    n_admitted=24,
    n_accepted=12,
    admitted_by_depth=[12, 8, 4, 0, 0, 0, 0],
    accepted_by_depth=[6, 5, 1, 0, 0, 0, 0],
    acceptance_lengths=[2, 1, 4, 1, 0, 0, 0, 0],
    draft_seconds=0.5,
    verify_seconds=2.0,
    sample_seconds=0.25,
    stall_seconds=1.0,
    n_experts_touched=700,
    n_experts_exact=900,
    n_row_experts=1000,
    n_touched_multi=550,
    n_exact_multi=750,
    n_missing=30,
    n_missing_exact=70,
    displaced_weight=3.0,
    n_token_layers=200,
    error_budget=0.05,
    n_committed_rows=32,
    n_biased_rows=8,
    routing_hits=300,
    routing_misses=90,
    routing_extra=60,
    judged_drafts=JUDGED,
    n_graph_builds=3,
    is_paced=True,
    controller_state="probing",
    n_pauses=2,
    n_probes=5,
    draft_length=2.5,
    verify_fit=CostFit(r2=0.97, mape=0.03, n=120),
    draft_fit=CostFit(r2=0.9, mape=0.06, n=80),
    single_seconds=0.05,
)
NOTHING_DRAFTED = SpeculationReport(
    disabled_reason="unsupported", n_steps=4, n_tokens=4, verify_seconds=1.5, error_budget=0.05
)
