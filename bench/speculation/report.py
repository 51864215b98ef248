"""The measured pairs as tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from s2moe.bench.speculation.goals import cell_estimates, drive_bound
from s2moe.bench.speculation.ratios import Estimate, estimate
from s2moe.bench.speculation.results import Pair, Results, Sample, limit_name
from s2moe.bench.targets import MIB, Line, table

Get = Callable[[Sample], float | None]


def markdown(results: Results, lines: Sequence[Line]) -> str:
    """`lines`: of goals.judge()."""
    parts = [
        head(results),
        "## Speed over plain decoding\n\nGeometric means of pairs, 95 % intervals.",
        summary(results),
    ]
    for limit in results.limits:
        parts += [f"### {limit_name(limit)}", speeds(results, limit), figures(results, limit)]
    parts += ["## Goals", f"```\n{table(list(lines))}\n```"]
    return "\n\n".join(parts) + "\n"


def head(results: Results) -> str:
    facts = results.facts
    machine, model = facts.get("machine", {}), facts.get("model", {})
    pairs = [pair for cell in results.cells.values() for pair in cell]
    n_short = sum(not pair.counts for pair in pairs)
    return (
        "# Speculative decoding, measured\n\n"
        f"{model.get('name', 'model')}, {facts.get('n_tokens')} tokens per answer, greedy, on "
        f"{machine.get('processor')}, {machine.get('n_cpus')} CPUs. {len(pairs)} pairs of a "
        "method and plain decoding, each pair on one prompt and one server, in turn"
        + (f"; {n_short} pairs with a short answer do not count." if n_short else ".")
    )


def summary(results: Results) -> str:
    """A row for each method."""
    limits = drive_bound(results)
    name = f"{', '.join(str(limit) for limit in limits)} MiB" if limits else "drive-bound limits"
    rows = []
    for method in results.methods:
        cells = cell_estimates(results, method)
        worst = min(cells, key=lambda cell: cells[cell].ratio, default=None)
        rows.append(
            [
                method,
                _text(estimate(results.ratios(method, limits=limits))),
                _text(estimate(results.ratios(method))),
                "–" if worst is None else f"{cells[worst].ratio:.2f} ({worst})",
            ]
        )
    return _rows(["method", f"at {name}", "everywhere", "worst cell"], rows)


def speeds(results: Results, limit: int | None) -> str:
    """Of one limit: a row for each workload, a column for each method."""
    rows = [
        [
            workload,
            *(
                _text(estimate(results.ratios(method, workload=workload, limits=(limit,))))
                for method in results.methods
            ),
        ]
        for workload in results.workloads
    ]
    means = [_text(estimate(results.ratios(method, limits=(limit,)))) for method in results.methods]
    return _rows(["workload", *results.methods], [*rows, ["all", *means]])


def figures(results: Results, limit: int | None) -> str:
    """Of one limit: a row for each method, medians over its answers."""
    columns: list[tuple[str, str, Get]] = [
        ("tok/s", "{:.1f}", lambda sample: 1 / sample.seconds_per_token),
        ("stalled", "{:.0%}", lambda sample: sample.stall_share),
        ("MiB/token", "{:.1f}", lambda sample: _over(sample.read_bytes_per_token, MIB)),
        ("misses/token", "{:.1f}", lambda sample: sample.misses_per_token),
        ("avoided/token", "{:.1f}", lambda sample: sample.per_token("misses_avoided")),
        ("experts/token", "{:.0f}", experts_per_token),
        ("tokens/step", "{:.2f}", lambda sample: _speculation(sample, "mean_tokens_per_step")),
        ("acceptance length", "{:.2f}", lambda sample: _speculation(sample, "acceptance_length")),
        ("reuse ratio", "{:.2f}", lambda sample: _speculation(sample, "reuse_ratio")),
        ("ungated", "{:.2f}", lambda sample: _speculation(sample, "reuse_ratio_ungated")),
        ("displaced", "{:.1%}", lambda sample: _speculation(sample, "displaced_weight")),
    ]
    rows = []
    answers: dict[str, list[Sample]] = {"off": []}
    for method in results.methods:
        pairs = results.pairs(method, limits=(limit,))
        answers[method] = [pair.method for pair in pairs]
        answers["off"] += [pair.off for pair in pairs]
    for method, samples in answers.items():
        cells = [_median(samples, get, form) for _, form, get in columns]
        rows.append([method, *cells])
    return _rows(["medians", *(name for name, _, _ in columns)], rows)


def experts_per_token(sample: Sample) -> float | None:
    """Distinct experts of a layer per evaluation of the target, over the tokens that it gave."""
    touched = sample.per_token("experts_touched")
    return sample.lookups_per_token if touched is None else touched


def acceptance(pairs: Iterable[Pair]) -> tuple[float, float] | None:
    """Medians of a method: acceptance length, which answers without a verification have not, and experts
    touched for each token."""
    points = [
        (length, cost)
        for pair in pairs
        if (length := _speculation(pair.method, "acceptance_length")) is not None
        and (cost := experts_per_token(pair.method)) is not None
    ]
    if not points:
        return None
    return statistics.median(x for x, _ in points), statistics.median(y for _, y in points)


def median_value(samples: Iterable[Sample], get: Get) -> float | None:
    values = [value for sample in samples if (value := get(sample)) is not None]
    return statistics.median(values) if values else None


def _median(samples: Iterable[Sample], get: Get, form: str) -> str:
    value = median_value(samples, get)
    return "–" if value is None else form.format(value)


def _speculation(sample: Sample, key: str) -> float | None:
    value: Any = sample.speculation.get(key)
    return None if value is None else float(value)


def _over(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _text(estimated: Estimate | None) -> str:
    return "–" if estimated is None else str(estimated)


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
