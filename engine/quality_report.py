"""What `s2moe quality` found, as tables and as JSON (docs/quality.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from s2moe.engine.divergence import Divergence, Rows

FORMAT: Final = "s2moe-quality"
VERSION: Final = 1

_SUMMED: Final = (
    *("n_steps", "n_iterations", "n_tokens", "n_drafted", "n_admitted", "n_accepted"),
    *("n_experts_touched", "n_experts_exact", "n_row_experts", "n_touched_multi", "n_exact_multi"),
    *("n_missing", "n_missing_exact", "displaced_weight", "n_token_layers"),
    *("n_committed_rows", "n_biased_rows", "draft_seconds", "verify_seconds", "stall_seconds"),
)
"""Counters of a report that are added up over the windows."""


@dataclass(frozen=True)
class Setting:
    """One way to decode that is compared with the exact one."""

    name: str
    options: Mapping[str, object]
    """Of s2moe_speculator_begin()."""


class Totals:
    """Counters of several reports of s2moe_speculator_report()."""

    def __init__(self, reports: Iterable[Mapping[str, Any]]) -> None:
        self._sums: dict[str, float] = dict.fromkeys(_SUMMED, 0)
        self.reasons: list[str] = []
        """Why drafting was off in some window; each reason once."""
        for report in reports:
            for name in _SUMMED:
                self._sums[name] += report[name]
            if (reason := report["disabled_reason"]) and reason not in self.reasons:
                self.reasons.append(reason)

    def __getitem__(self, name: str) -> float:
        return self._sums[name]

    def ratio(self, over: str, under: str) -> float | None:
        """None where nothing was counted."""
        return self._sums[over] / self._sums[under] if self._sums[under] else None

    @property
    def n_misses_avoided(self) -> int:
        return int(self._sums["n_missing_exact"] - self._sums["n_missing"])

    def to_json(self) -> dict[str, float]:
        return dict(self._sums)


@dataclass(frozen=True)
class SettingQuality:
    """What a setting did along the text."""

    setting: Setting
    rows: Rows
    n_biased: npt.NDArray[np.int32]
    """[n_rows] layers of each row whose choice of experts gating changed."""
    totals: Totals
    seconds: float
    """In the steps; along a given text, not along the model's own."""

    @property
    def parts(self) -> dict[str, Divergence | None]:
        biased = self.n_biased > 0
        return {
            "all": Divergence.of(self.rows),
            "biased": Divergence.of(self.rows.select(biased)),
            "unbiased": Divergence.of(self.rows.select(~biased)),
        }

    @property
    def biased_share(self) -> float:
        return float((self.n_biased > 0).mean())

    @property
    def tokens_per_second(self) -> float:
        return len(self.rows) / self.seconds

    def to_json(self) -> dict[str, Any]:
        totals = self.totals
        accepted = totals.ratio("n_accepted", "n_iterations")
        return {
            "name": self.setting.name,
            "options": dict(self.setting.options),
            "rows": {name: part and part.to_json() for name, part in self.parts.items()},
            "biased_share": self.biased_share,
            "displaced_weight": totals.ratio("displaced_weight", "n_token_layers"),
            "reuse_ratio": totals.ratio("n_touched_multi", "n_row_experts"),
            "reuse_ratio_ungated": totals.ratio("n_exact_multi", "n_row_experts"),
            "misses_avoided": totals.n_misses_avoided,
            "misses_avoided_share": _share(totals.n_misses_avoided, totals["n_missing_exact"]),
            "acceptance_length": None if accepted is None else 1 + accepted,
            "mean_tokens_per_step": totals.ratio("n_tokens", "n_steps"),
            "tokens_per_second": self.tokens_per_second,
            "disabled_reasons": totals.reasons,
            "totals": totals.to_json(),
        }


@dataclass(frozen=True)
class QualityReport:
    """Everything that `s2moe quality` found."""

    model: Mapping[str, Any]
    memory: Mapping[str, Any]
    text: Mapping[str, Any]
    build: str
    exact_tokens_per_second: float
    settings: Sequence[SettingQuality]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "build": self.build,
            "model": dict(self.model),
            "memory": dict(self.memory),
            "text": dict(self.text),
            "exact": {"tokens_per_second": self.exact_tokens_per_second},
            "settings": [setting.to_json() for setting in self.settings],
        }

    def lines(self) -> list[str]:
        """For people: two tables in Markdown."""
        text, memory = self.text, self.memory
        lines = [
            f"{self.model['name']}: {text['n_scored']} positions of {text['file']} "
            f"({text['n_windows']} × {text['window_tokens']} tokens); "
            f"{memory['n_slots']} of {memory['n_experts']} experts fit",
            "",
        ]
        lines += markdown_table(
            ("setting", "rows", "n", "mean KL", "RMS Δp", "same top-1", "perplexity", "of exact"),
            [row for setting in self.settings for row in _divergence_rows(setting)],
        )
        lines.append("")
        lines += markdown_table(
            (
                *("setting", "biased rows", "displaced", "reuse ratio", "without gating", "misses avoided"),
                *("acceptance length", "tokens per step", "tok/s", "of exact"),
            ),
            [_reuse_row(setting, self.exact_tokens_per_second) for setting in self.settings],
        )
        return lines


def _divergence_rows(quality: SettingQuality) -> Iterable[tuple[str, ...]]:
    for name, part in quality.parts.items():
        if part is None:
            yield (quality.setting.name, name, "0", *["–"] * 5)
            continue
        yield (
            quality.setting.name,
            name,
            str(part.n_rows),
            f"{part.mean_kl:.4f}",
            f"{100 * part.rms_delta_p:.2f} %",
            f"{100 * part.same_top1:.1f} ± {100 * part.same_top1_error:.1f} %",
            f"{part.perplexity:.3f}",
            f"{part.perplexity_ratio:.4f} ×",
        )


def _reuse_row(quality: SettingQuality, exact_tokens_per_second: float) -> tuple[str, ...]:
    found = quality.to_json()
    return (
        quality.setting.name,
        _percent(found["biased_share"]),
        _percent(found["displaced_weight"], 2),
        _number(found["reuse_ratio"], 3),
        _number(found["reuse_ratio_ungated"], 3),
        f"{found['misses_avoided']} ({_percent(found['misses_avoided_share'])})",
        _number(found["acceptance_length"], 2),
        _number(found["mean_tokens_per_step"], 2),
        f"{quality.tokens_per_second:.1f}",
        f"{quality.tokens_per_second / exact_tokens_per_second:.2f} ×",
    )


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, n_text_columns: int = 2
) -> list[str]:
    """Aligned, so that it can be read as it is: the first columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if number < n_text_columns else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * width if number < n_text_columns else "-" * (width - 1) + ":"
        for number, width in enumerate(widths)
    ]
    return [line(header), line(rule), *map(line, rows)]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
