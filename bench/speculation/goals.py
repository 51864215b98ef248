"""What speculation must reach, and each goal judged by the measured pairs."""

from __future__ import annotations

from typing import Final

from s2moe.bench.speculation.floor import Outcome, judge_floor
from s2moe.bench.speculation.methods import ABLATIONS, STATIC, method_named
from s2moe.bench.speculation.quality_file import Agreements
from s2moe.bench.speculation.ratios import compare, estimate
from s2moe.bench.speculation.results import Results, limit_name
from s2moe.bench.targets import Line, at_least, at_most

DRIVE_BOUND: Final = (1050, 1500, 2100)
"""MiB: limits of the 64-expert demo model at which waiting for the drive is a large part of plain
decoding."""
SPEED_RATIOS: Final = {"exact": 1.1, "balanced": 1.3, "fast": 2.0}
"""Geometric means over DRIVE_BOUND."""
SAME_SETTING: Final = ("exact", "no-reuse-gating")
"""Two names of one setting: without gating `balanced` has nothing that `exact` lacks. Both are measured."""
AGREEMENTS: Final = {"balanced": 0.93, "fast": 0.88}
"""Committed tokens whose likeliest token is that of the exact target."""
FIT_R2: Final = 0.95
FIT_MAPE: Final = 0.05


def drive_bound(results: Results) -> tuple[int | None, ...]:
    return tuple(limit for limit in results.limits if limit in DRIVE_BOUND)


def judge(results: Results, agreement: Agreements) -> list[Line]:
    """`agreement`: of `s2moe quality`; empty: not measured."""
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


def judge_speed(results: Results, agreement: Agreements) -> list[Line]:
    lines = []
    limits = drive_bound(results)
    names = ", ".join(str(limit) for limit in limits)
    for method, target in SPEED_RATIOS.items():
        found = estimate(results.ratios(method, limits=limits))
        if found is None:
            continue
        what = f"{method}: geometric mean at {names} MiB"
        lines.append(at_least("speed", what, found.ratio, target, " × off"))
        lines.append(Line("speed", f"{method}: its interval", f"{found} × off"))
        if method in AGREEMENTS:
            lines += judge_agreement(method, limits, agreement)
    pooled = estimate(pooled_ratios(results, limits=limits))
    if pooled is not None:
        what = f"{' and '.join(SAME_SETTING)}, one setting, in the cells of both"
        lines.append(Line("speed", what, f"{pooled} × off"))
    control = estimate(results.ratios("control"))
    if control is not None:
        lines.append(Line("speed", "control: off against off", f"{control} ×"))
    static = estimate(results.ratios("static"))
    if static is not None:
        lines.append(Line("speed", "balanced on a static hot list, against off on it", f"{static} ×"))
    return lines


def judge_agreement(method: str, limits: tuple[int | None, ...], agreement: Agreements) -> list[Line]:
    """The least over the limits that were measured; those of `limits` that were not are named."""
    target = f"≥ {100 * AGREEMENTS[method]:g} %"
    what = f"{method}: top-1 agreement on committed tokens"
    least = agreement.least(method)
    if least is None:
        return [Line("speed", what, "not measured (--quality)", target)]
    limit, measured = least
    n_limits = len(agreement.limits(method))
    where = f"at {limit_name(limit)}" + (f", the least of {n_limits} limits" if n_limits > 1 else "")
    passed = measured.share >= AGREEMENTS[method]
    lines = [Line("speed", f"{what} {where}", str(measured), target, passed)]
    missing = [limit for limit in limits if agreement.at(method, limit) is None]
    if missing:
        names = ", ".join(limit_name(limit) for limit in missing)
        lines.append(Line("speed", f"{method}: agreement at {names}", "not measured (--quality)", target))
    return lines


def pooled_ratios(results: Results, *, limits: tuple[int | None, ...] | None = None) -> list[float]:
    """Of both methods of SAME_SETTING, in the cells that both have; empty: there are none."""
    pairs = []
    for limit, workload, name in results.cells:
        if name != SAME_SETTING[0] or not (limits is None or limit in limits):
            continue
        both = [results.ratios(each, workload=workload, limits=(limit,)) for each in SAME_SETTING]
        if all(both):
            pairs += [ratio for ratios in both for ratio in ratios]
    return pairs


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
    where the interval lies above 1, and missed where it lies below."""
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
            outcome = Outcome.of(found, 1.0)
            what, text = f"balanced / {name}: {outcome}", f"{found} ×"
            lines.append(Line("components", what, text, "≥ 1 ×", outcome.passed))
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
