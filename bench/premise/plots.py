"""The figures as plots, drawn with the optional dependency `s2moe[bench]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from s2moe.bench.plotting import load_pyplot, save_figure
from s2moe.bench.premise.report import MAX_DEPTH, Premise

_WIDE = (9, 3.4)
_SPEED_AXES = {
    "draft_experts": "experts per token of a draft, k_d",
    "reuse_cap": "experts in use per layer, cap",
}


def draw(premise: Premise, folder: Path) -> list[Path]:
    """Returns the files written. Raises PlottingError."""
    plt = load_pyplot()
    paths = []
    if premise.figures and premise.n_starts:
        paths += [
            save_figure(_routing(plt, premise), folder / "premise-routing.svg"),
            save_figure(_divergence(plt, premise), folder / "premise-divergence.svg"),
            save_figure(_acceptance(plt, premise), folder / "premise-acceptance.svg"),
        ]
    if premise.cells:
        paths.append(save_figure(_speeds(plt, premise), folder / "premise-speed.svg"))
    return paths


def _routing(plt: Any, premise: Premise) -> Any:
    """Precision by depth and by layer."""
    figure, (left, right) = plt.subplots(1, 2, figsize=_WIDE)
    depths = slice(1, MAX_DEPTH + 1)
    k = premise.model["n_expert_used"]
    for draft in premise.figures:
        values = draft.own.precision(k, by_layer=False, depths=depths)
        left.plot(range(1, MAX_DEPTH + 1), values, marker="o", label=f"own, {draft.n_experts} experts")
    draft = premise.default_figure
    left.plot(
        range(1, MAX_DEPTH + 1),
        draft.parent.precision(k, by_layer=False, depths=depths),
        linestyle="--",
        color="gray",
        label=f"parent's, {draft.n_experts} experts",
    )
    left.set(xlabel="draft depth", ylabel=f"share of the predicted {k} that are used", ylim=(0, 1.03))
    left.legend()
    for name, counts, style in (("own", draft.own, "-"), ("parent's", draft.parent, "--")):
        right.plot(
            draft.own.layers,
            counts.precision(k, by_layer=True, depths=depths),
            style,
            label=name,
        )
    right.set(
        xlabel="layer", ylim=(0, 1.03), title=f"{draft.n_experts} draft experts, depths 1 to {MAX_DEPTH}"
    )
    right.legend()
    return figure


def _divergence(plt: Any, premise: Premise) -> Any:
    figure, axes = plt.subplots(figsize=(5.5, 3.4))
    for number, draft in enumerate(premise.figures):
        steps = np.arange(1, len(draft.shared.mean_kl) + 1)
        color = f"C{number}"
        axes.plot(steps, draft.shared.mean_kl, color=color, marker="o", label=f"{draft.n_experts}, shared")
        axes.plot(
            steps, draft.independent.mean_kl, "--", color=color, label=f"{draft.n_experts}, independent"
        )
    axes.set(xlabel="decode step", ylabel="KL(target ‖ draft), nats", ylim=(0, None))
    axes.legend(title="draft experts, KV cache", ncols=2)
    return figure


def _acceptance(plt: Any, premise: Premise) -> Any:
    figure, axes = plt.subplots(figsize=(5.5, 3.4))
    for draft in premise.figures:
        steps = np.arange(1, len(draft.shared.greedy_acceptance) + 1)
        axes.plot(steps, draft.shared.greedy_acceptance, marker="o", label=f"{draft.n_experts} experts")
    axes.set(xlabel="decode step", ylabel="greedy acceptance", ylim=(0, 1.03))
    axes.legend()
    return figure


def _speeds(plt: Any, premise: Premise) -> Any:
    """Speed with its interval and acceptance length, over k_d and over the cap."""
    figure, panels = plt.subplots(1, 2, figsize=_WIDE)
    fastest = max((cell.speed.ratio for cell in premise.cells if cell.speed is not None), default=1.0)
    longest = max((cell.acceptance_length or 1.0 for cell in premise.cells), default=1.0)
    for panel, (axis, label) in zip(panels, _SPEED_AXES.items(), strict=True):
        cells = [cell for cell in premise.cells if cell.axis == axis]
        speeds = [(cell.value, cell.speed) for cell in cells if cell.speed is not None]
        for value, speed in speeds:
            low, high = speed.low or speed.ratio, speed.high or speed.ratio
            error = ([max(0.0, speed.ratio - low)], [max(0.0, high - speed.ratio)])
            panel.errorbar([value], [speed.ratio], yerr=error, color="C0", capsize=3)
        columns = [value for value, _ in speeds], [speed.ratio for _, speed in speeds]
        (speed_line,) = panel.plot(*columns, "o-", color="C0")
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(xlabel=label, ylabel="speed, × plain decoding", ylim=(0, 1.3 * max(1.0, fastest)))
        panel.set_xticks([cell.value for cell in cells])
        lengths = [
            (cell.value, cell.acceptance_length) for cell in cells if cell.acceptance_length is not None
        ]
        beside = panel.twinx()
        columns = [value for value, _ in lengths], [length for _, length in lengths]
        (length_line,) = beside.plot(*columns, "s--", color="C1")
        beside.set(ylabel="acceptance length, tokens", ylim=(0, 1.3 * longest))
        beside.grid(visible=False)
        panel.legend([speed_line, length_line], ["speed", "acceptance length"], loc="lower right")
    figure.tight_layout()
    return figure
