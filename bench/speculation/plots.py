"""The measured pairs as plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from s2moe.bench.plotting import load_pyplot, save_figure
from s2moe.bench.speculation.goals import AGREEMENTS, drive_bound
from s2moe.bench.speculation.quality_file import Agreements
from s2moe.bench.speculation.ratios import Estimate, estimate
from s2moe.bench.speculation.report import acceptance, experts_per_token, median_value
from s2moe.bench.speculation.results import Results, limit_name

SUFFIX: Final = ".svg"
_MARKERS: Final = "osD^vP*X"


def draw_all(results: Results, agreement: Agreements, folder: Path) -> list[Path]:
    """Writes what there is data for; returns the files. Raises PlottingError and OSError."""
    drawn = [speed_ups(results, folder), acceptance_costs(results, folder)]
    if agreement.cells:
        drawn.append(speed_agreement(results, agreement, folder))
    return [path for path in drawn if path is not None]


def speed_ups(results: Results, folder: Path) -> Path | None:
    """Bars over workloads, a panel for each limit."""
    if not results.cells:
        return None
    plt = load_pyplot()
    limits, workloads, methods = results.limits, [*results.workloads, "all"], results.methods
    width, drawn = 0.8 / max(1, len(methods)), {}
    size = (2.5 + 0.28 * len(workloads) * len(methods), 2.3 * len(limits))
    figure, panels = plt.subplots(len(limits), 1, figsize=size, sharex=True, squeeze=False)
    for panel, limit in zip(panels[:, 0], limits, strict=True):
        for number, method in enumerate(methods):
            places, heights, errors = [], [], []
            for place, workload in enumerate(workloads):
                chosen = None if workload == "all" else workload
                found = estimate(results.ratios(method, workload=chosen, limits=(limit,)))
                if found is not None:
                    places.append(place + (number - (len(methods) - 1) / 2) * width)
                    heights.append(found.ratio)
                    low, high = found.low or found.ratio, found.high or found.ratio
                    errors.append((max(0.0, found.ratio - low), max(0.0, high - found.ratio)))
            down_up = ([down for down, _ in errors], [up for _, up in errors])
            style = {"yerr": down_up, "error_kw": {"linewidth": 0.7}, "color": f"C{number}"}
            bars = panel.bar(places, heights, width, **style)
            if places:
                drawn[method] = bars
        panel.axhline(1.0, color="black", linewidth=0.8)
        # intervals of two or three pairs may be many times as wide as all bars are high
        ratios = [found for method in methods for found in results.ratios(method, limits=(limit,))]
        panel.set_ylim(0, 1.15 * max([1.0, *ratios]))
        panel.set_title(limit_name(limit), loc="left")
        panel.set_ylabel("speed / off")
        panel.grid(axis="x", visible=False)
    panels[-1, 0].set_xticks(range(len(workloads)), workloads)
    panels[0, 0].legend(
        drawn.values(), drawn.keys(), ncols=min(5, len(methods)), loc="lower left", bbox_to_anchor=(0.15, 1.0)
    )
    return save_figure(figure, folder / f"speed-up{SUFFIX}")


def acceptance_costs(results: Results, folder: Path) -> Path | None:
    """Acceptance length against the experts that each token touched, and off as a line."""
    plt = load_pyplot()
    figure, panel = plt.subplots(figsize=(6, 4.2))
    markers = dict(zip(results.limits, _MARKERS, strict=False))
    drawn: dict[str, Any] = {}
    for number, method in enumerate(results.methods):
        for limit, marker in markers.items():
            point = acceptance(results.pairs(method, limits=(limit,)))
            if point is not None:
                style = {"color": f"C{number % 10}", "linestyle": "none"}
                panel.plot([point[1]], [point[0]], marker=marker, **style)
                drawn.setdefault(method, panel.plot([], [], marker="s", **style)[0])
    if not drawn:
        plt.close(figure)
        return None
    for limit, marker in markers.items():
        (drawn[limit_name(limit)],) = panel.plot([], [], marker=marker, color="C7", linestyle="none")
    plain = median_value(
        (pair.off for method in results.methods for pair in results.pairs(method)), experts_per_token
    )
    if plain is not None:
        drawn["off"] = panel.axvline(plain, color="black", linewidth=0.8, linestyle=":")
    panel.set_xlabel("experts of a layer touched by the target for each token")
    panel.set_ylabel("acceptance length: tokens of a verification")
    panel.legend(drawn.values(), drawn.keys(), loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save_figure(figure, folder / f"acceptance-cost{SUFFIX}")


def speed_agreement(results: Results, agreement: Agreements, folder: Path) -> Path | None:
    """What a budget of errors buys, a panel for each drive-bound limit that has both measurements."""
    points: dict[int | None, list[tuple[float, Estimate, str]]] = {}
    for limit in drive_bound(results) or tuple(results.limits):
        for method in results.methods:
            found, measured = estimate(results.ratios(method, limits=(limit,))), agreement.at(method, limit)
            if measured is not None and found is not None:
                points.setdefault(limit, []).append((100 * measured.share, found, method))
    if not points:
        return None
    plt = load_pyplot()
    size = (4.2 * len(points), 3.8)
    figure, panels = plt.subplots(1, len(points), figsize=size, sharey=True, squeeze=False)
    highest = max(found.ratio for of_limit in points.values() for _, found, _ in of_limit)
    for panel, (limit, of_limit) in zip(panels[0], points.items(), strict=True):
        of_limit.sort(key=lambda point: point[0])
        line = [share for share, _, _ in of_limit], [found.ratio for _, found, _ in of_limit]
        panel.plot(*line, "-", color="C7")
        for share, found, method in of_limit:
            low, high = found.low or found.ratio, found.high or found.ratio
            errors = ([max(0.0, found.ratio - low)], [max(0.0, high - found.ratio)])
            panel.errorbar([share], [found.ratio], yerr=errors, fmt="o", capsize=3, color="C0")
            panel.annotate(method, (share, found.ratio), textcoords="offset points", xytext=(6, 4))
        for target in AGREEMENTS.values():
            panel.axvline(100 * target, color="C3", linewidth=0.8, linestyle=":")
        panel.set_ylim(0, 1.3 * highest)
        panel.set_title(limit_name(limit), loc="left")
    figure.supxlabel("top-1 agreement with the exact target, committed tokens (%)", fontsize=9)
    panels[0, 0].set_ylabel("speed / off")
    figure.tight_layout()
    return save_figure(figure, folder / f"speed-agreement{SUFFIX}")


def predictions(fits: Mapping[str, Mapping[str, Any]], folder: Path) -> Path:
    """`fits`: by limit, as cost_fit measures them: predicted against measured time of verifications."""
    plt = load_pyplot()
    figure, panels = plt.subplots(1, len(fits), figsize=(3.4 * len(fits), 3.4), squeeze=False)
    for panel, (name, fit) in zip(panels[0], fits.items(), strict=True):
        measured = [1e3 * seconds for _, seconds in fit["samples"]]
        predicted = [1e3 * seconds for seconds, _ in fit["samples"]]
        panel.plot(measured, predicted, ".", markersize=4, alpha=0.6)
        end = max([*measured, *predicted], default=1.0)
        panel.plot([0, end], [0, end], color="black", linewidth=0.8)
        panel.set_title(f"{name}: R² {fit['r2']:.3f}, MAPE {100 * fit['mape']:.1f} %", loc="left")
        panel.set_xlabel("measured (ms)")
    panels[0, 0].set_ylabel("predicted (ms)")
    return save_figure(figure, folder / f"predicted-measured{SUFFIX}")
