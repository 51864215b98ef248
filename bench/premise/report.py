"""The figures as tables and JSON (docs/quality.md says what they mean)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from s2moe.bench.premise.figures import DraftFigures, FloatArray, RoutingCounts
from s2moe.bench.premise.speeds import Cell
from s2moe.engine.quality_report import markdown_table

FORMAT: Final = "s2moe-premise"
VERSION: Final = 1
MAX_DEPTH: Final = 6
_DEPTHS: Final = slice(1, MAX_DEPTH + 1)


@dataclass
class Premise:
    """Everything that was measured."""

    model: Mapping[str, Any]
    build: str
    figures: list[DraftFigures] = field(default_factory=list)
    n_texts: int = 0
    n_starts: int = 0
    cells: list[Cell] = field(default_factory=list)
    memory: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "build": self.build,
            "model": dict(self.model),
            "memory": dict(self.memory),
            "n_texts": self.n_texts,
            "n_starts": self.n_starts,
            "drafts": [figure.to_json() for figure in self.figures] if self.n_starts else [],
            "speed": [cell.to_json() for cell in self.cells],
        }

    @property
    def default_figure(self) -> DraftFigures:
        """That of the draft's default number of experts, else of the nearest."""
        wanted = max(1, self.model["n_expert_used"] // 4)
        return min(self.figures, key=lambda figure: abs(figure.n_experts - wanted))

    def markdown(self) -> str:
        parts: list[list[str]] = []
        if self.figures and self.n_starts:
            parts += [
                [f"{self.n_starts} starts in {self.n_texts} texts, {self.model['name']}."],
                ["### Predicted experts by draft depth", "", *self._depth_table()],
                [
                    "### Predicted experts by layer, "
                    f"{self.default_figure.n_experts} draft experts, depths 1 to {MAX_DEPTH}",
                    "",
                    *self._layer_table(),
                ],
                ["### KL(target ‖ draft) by decode step, nats", "", *self._divergence_table()],
                ["### Acceptance", "", *self._acceptance_table()],
            ]
        if self.cells:
            parts.append(["### Speed against plain decoding", "", *self._speed_table()])
        return "\n\n".join("\n".join(part) for part in parts) + "\n"

    def _depth_table(self) -> list[str]:
        k = self.model["n_expert_used"]

        def rows(figure: DraftFigures) -> Iterable[tuple[str, ...]]:
            used, own = figure.n_experts, figure.own
            predictions = [
                (f"the token, best {k}: precision = recall", own, k, RoutingCounts.precision),
                (f"its parent, best {k}: precision = recall", figure.parent, k, RoutingCounts.precision),
            ]
            if used < k:
                predictions += [
                    (f"the token, best {used}: precision", own, used, RoutingCounts.precision),
                    (f"the token, best {used}: recall", own, used, RoutingCounts.recall),
                ]
            for name, counts, n_best, measure in predictions:
                values = measure(counts, n_best, by_layer=False, depths=_DEPTHS)
                yield (str(used), name, *map(percent, values))

        depths = [f"depth {depth}" for depth in range(1, MAX_DEPTH + 1)]
        return markdown_table(
            ("k_d", "predicted from routing of", *depths),
            [row for figure in self.figures for row in rows(figure)],
        )

    def _layer_table(self) -> list[str]:
        figure, k = self.default_figure, self.model["n_expert_used"]
        used = figure.n_experts
        columns = [
            figure.own.precision(k, by_layer=True, depths=_DEPTHS),
            figure.parent.precision(k, by_layer=True, depths=_DEPTHS),
            figure.own.precision(used, by_layer=True, depths=_DEPTHS),
            figure.own.recall(used, by_layer=True, depths=_DEPTHS),
        ]
        header = (
            *("layer", f"the token, best {k}", f"its parent, best {k}"),
            *(f"the token, best {used}: precision", f"best {used}: recall"),
        )
        rows = [
            (str(layer), *(percent(column[number]) for column in columns))
            for number, layer in enumerate(figure.own.layers)
        ]
        rows.append(("mean", *(percent(_mean(column)) for column in columns)))
        return markdown_table(header, rows, n_text_columns=1)

    def _divergence_table(self) -> list[str]:
        rows = [
            (str(figure.n_experts), name, *(f"{value:.3f}" for value in steps.mean_kl))
            for figure in self.figures
            for name, steps in (("shared", figure.shared), ("independent", figure.independent))
        ]
        header = ("k_d", "KV cache", *(f"step {step}" for step in range(1, len(rows[0]) - 1)))
        return markdown_table(header, rows)

    def _acceptance_table(self) -> list[str]:
        rows = [
            (
                str(figure.n_experts),
                name,
                percent(steps.greedy_acceptance[0]),
                percent(float(steps.greedy_acceptance.mean())),
                f"{steps.greedy_length:.2f}",
                percent(steps.sampled_acceptance[0]),
                percent(float(steps.sampled_acceptance.mean())),
                f"{steps.sampled_length:.2f}",
            )
            for figure in self.figures
            for name, steps in (("shared", figure.shared), ("independent", figure.independent))
        ]
        header = (
            *("k_d", "KV cache", "greedy, step 1", "all steps", "length"),
            *("Σ min(p, q), step 1", "all steps", "length"),
        )
        return markdown_table(header, rows)

    def _speed_table(self) -> list[str]:
        rows = [
            (
                cell.axis.replace("_", " "),
                str(cell.value),
                "–" if cell.speed is None else f"{cell.speed} ×",
                _number(cell.acceptance_length),
                _number(cell.mean_tokens_per_step),
                _number(_mean(np.asarray(cell.tokens_per_second)) if cell.tokens_per_second else None),
            )
            for cell in self.cells
        ]
        header = ("varied", "value", "speed", "acceptance length", "tokens per step", "tok/s")
        return markdown_table(header, rows)


def percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _mean(values: FloatArray | Sequence[float]) -> float:
    return float(np.mean(values))
