"""What speculation must reach, and each goal judged by the measured pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from s2moe.bench.speculation.methods import ABLATIONS, PRESETS, STATIC, method_named
from s2moe.bench.speculation.ratios import Estimate, compare, estimate
from s2moe.bench.speculation.results import Results, limit_name
from s2moe.bench.targets import Line, at_least, at_most

DRIVE_BOUND: Final = (1050, 1500, 2100)
"""MiB: limits of the 64-expert demo model at which waiting for the drive is a large part of plain
decoding."""
FLOOR_RATIO: Final = 0.98
"""Of plain decoding, for the lower end of every cell's interval."""
SPEED_RATIOS: Final = {"exact": 1.1, "balanced": 1.3, "fast": 2.0}
"""Geometric means over DRIVE_BOUND."""
AGREEMENTS: Final = {"balanced": 0.93, "fast": 0.88}
"""Committed tokens whose likeliest token is that of the exact target."""
FIT_R2: Final = 0.95
FIT_MAPE: Final = 0.05


def drive_bound(results: Results) -> tuple[int | None, ...]:
    return tuple(limit for limit in results.limits if limit in DRIVE_BOUND)


def judge(results: Results, agreement: Mapping[str, float]) -> list[Line]:
    """`agreement`: top-1 agreement by method, of `s2moe quality`; empty: not measured."""
    return [
        *judge_floor(results),
        *judge_speed(results, agreement),
        *judge_texts(results),
        *judge_ablations(results),
        *judge_fits(results),
        *judge_errors(results),
    ]


def judge_errors(results: Results) -> list[Line]:
    """Cells that could not be measured are missed goals."""
    return [
        Line(
            "not measured",
            f"{limit_name(limit)}, {workload}, {name}",
            text.splitlines()[0][:100],
            passed=False,
        )
        for (limit, workload, name), text in results.errors.items()
    ]


def cell_estimates(results: Results, method: str) -> dict[str, Estimate]:
    """By the cell's name; cells without a pair that counts are left out."""
    found = {}
    for (limit, workload, name), pairs in results.cells.items():
        estimated = estimate([pair.ratio for pair in pairs if pair.counts])
        if name == method and estimated is not None:
            found[f"{limit_name(limit)}, {workload}"] = estimated
    return found


def judge_floor(results: Results) -> list[Line]:
    """The worst cell of each preset."""
    lines = []
    for method in PRESETS:
        # a single pair has no interval: it is its own lower end
        lows = {
            name: cell.ratio if cell.low is None else cell.low
            for name, cell in cell_estimates(results, method).items()
        }
        if lows:
            worst = min(lows, key=lows.__getitem__)
            below = sum(low < FLOOR_RATIO for low in lows.values())
            what = f"{method}: lower end of the worst of {len(lows)} cells ({worst}; {below} below)"
            lines.append(at_least("never slower", what, lows[worst], FLOOR_RATIO, " × off"))
    return lines


def judge_speed(results: Results, agreement: Mapping[str, float]) -> list[Line]:
    lines = []
    limits = drive_bound(results)
    names = ", ".join(str(limit) for limit in limits)
    for method, target in SPEED_RATIOS.items():
        found = estimate(results.ratios(method, limits=limits))
        if found is None:
            continue
        what = f"{method}: geometric mean at {names} MiB"
        lines.append(at_least("speed", what, found.ratio, target, " × off"))
        if found.low is not None:
            lines.append(Line("speed", f"{method}: its interval, {found.n} pairs", f"{found} × off"))
        if method not in AGREEMENTS:
            continue
        what = f"{method}: top-1 agreement on committed tokens"
        if method in agreement:
            lines.append(at_least("speed", what, 100 * agreement[method], 100 * AGREEMENTS[method], " %"))
        else:
            lines.append(Line("speed", what, "not measured (--quality)", f"≥ {100 * AGREEMENTS[method]:g} %"))
    control = estimate(results.ratios("control"))
    if control is not None:
        lines.append(Line("speed", "control: off against off", f"{control} ×"))
    static = estimate(results.ratios("static"))
    if static is not None:
        lines.append(Line("speed", "balanced on a static hot list, against off on it", f"{static} ×"))
    return lines


def judge_texts(results: Results) -> list[Line]:
    """Plain decoding and the methods without gating give one text per prompt, under every limit."""
    lines = []
    plain: dict[tuple[str, int], set[str]] = {}
    for (_, workload, _), pairs in results.cells.items():
        for pair in pairs:
            plain.setdefault((workload, pair.prompt), set()).add(pair.off.text_digest)
    if plain:
        n_other = sum(len(digests) > 1 for digests in plain.values())
        what = f"off: prompts of {len(plain)} whose text is not always the same"
        lines.append(at_most("texts", what, n_other, 0))
    for name in results.methods:
        pairs = [pair for (_, _, method), cell in results.cells.items() if method == name for pair in cell]
        n_other = sum(not pair.same_text for pair in pairs)
        what = f"{name}: texts of {len(pairs)} that differ from off's"
        if method_named(name).keeps_text:
            lines.append(at_most("texts", what, n_other, 0))
        else:
            lines.append(Line("texts", what, str(n_other)))
    return lines


def judge_ablations(results: Results) -> list[Line]:
    """What each component adds: balanced over balanced without it, over the cells that both have. It is shown
    where the interval lies above 1."""
    lines = []
    for name in ABLATIONS:
        common = [
            key for key in results.cells if key[2] == name and (key[0], key[1], "balanced") in results.cells
        ]
        whole = [
            pair.ratio
            for limit, workload, _ in common
            for pair in results.cells[limit, workload, "balanced"]
            if pair.counts
        ]
        without = [pair.ratio for key in common for pair in results.cells[key] if pair.counts]
        found = compare(whole, without)
        if found is not None:
            lines.append(Line("components", f"balanced / {name}", f"{found} ×"))
            low = found.ratio if found.low is None else found.low
            lines.append(at_least("components", f"balanced / {name}: lower end", low, 1.0, " ×"))
    return lines


def judge_fits(results: Results) -> list[Line]:
    lines = []
    for name, fit in results.fits.items():
        is_reference = name.endswith(f", {STATIC}")
        if fit["n"] > 0 and not is_reference:
            lines += [
                at_least("cost model", f"{name}: R² of {fit['n']:.0f} verifications", fit["r2"], FIT_R2),
                at_most("cost model", f"{name}: MAPE", 100 * fit["mape"], 100 * FIT_MAPE, " %"),
            ]
    return lines
