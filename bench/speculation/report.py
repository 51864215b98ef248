"""The measured pairs as tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from s2moe.bench.speculation.floor import FLOOR_RATIO, Outcome, cell_estimates, cell_name
from s2moe.bench.speculation.goals import SAME_SETTING, drive_bound, pooled_ratios
from s2moe.bench.speculation.methods import PRESETS
from s2moe.bench.speculation.ratios import Estimate, estimate
from s2moe.bench.speculation.results import Pair, Results, Sample, limit_name
from s2moe.bench.targets import MIB, Line, table

Get = Callable[[Sample], float | None]


def markdown(results: Results, lines: Sequence[Line]) -> str:
    """`lines`: of goals.judge()."""
    parts = [
        head(results),
        "## Speed over plain decoding\n\nGeometric means of pairs, 95 % intervals (Student's t of the "
        "logarithms; a single pair has none), and how many pairs counted.",
        summary(results),
    ]
    for limit in results.limits:
        parts += [f"### {limit_name(limit)}", speeds(results, limit), figures(results, limit)]
    if set(results.methods) & set(PRESETS):
        parts += [
            f"## Never slower\n\nWhether a cell's interval is at or above {FLOOR_RATIO:g} × off (shown), "
            "below it (missed), or neither.",
            floor(results),
        ]
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
        cells = {cell: found for cell, found in cell_estimates(results, method).items() if found is not None}
        worst = min(cells, key=lambda cell: cells[cell].ratio, default=None)
        rows.append(
            [
                method,
                _text(estimate(results.ratios(method, limits=limits))),
                _text(estimate(results.ratios(method))),
                "–" if worst is None else f"{cells[worst]} ({worst})",
            ]
        )
    pooled = estimate(pooled_ratios(results))
    if pooled is not None:
        drive_bound_ones = _text(estimate(pooled_ratios(results, limits=limits)))
        name_of_both = f"{' and '.join(SAME_SETTING)}, one setting: the cells of both"
        rows.append([name_of_both, drive_bound_ones, _text(pooled), "–"])
    return _rows(["method", f"at {name}", "everywhere", "worst cell"], rows)


def floor(results: Results) -> str:
    """A row for each cell of a preset; what could not be measured is among the goals."""
    methods = [method for method in results.methods if method in PRESETS]
    cells = {method: cell_estimates(results, method) for method in methods}
    rows = []
    for limit in results.limits:
        for workload in results.workloads:
            name = cell_name(limit, workload)
            if any(name in of_method for of_method in cells.values()):
                rows.append([name, *(_outcome(cells[method], name) for method in methods)])
    return _rows(["cell", *methods], rows)


def _outcome(cells: Mapping[str, Estimate | None], name: str) -> str:
    if name not in cells:
        return "–"
    found = cells[name]
    return "no pair counts" if found is None else f"{Outcome.of(found, FLOOR_RATIO)}: {found:.3f}"


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
    text = _rows(["workload", *results.methods], [*rows, ["all", *means]])
    pooled = estimate(pooled_ratios(results, limits=(limit,)))
    if pooled is not None:
        names = " and ".join(f"`{name}`" for name in SAME_SETTING)
        text += f"\n\n{names} are one setting; together, in the cells of both: {pooled}."
    return text


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
