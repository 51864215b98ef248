"""Top-1 agreement from files of `s2moe quality --json`, by the names that methods and limits have here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from s2moe.bench.targets import MIB


class QualityFileError(Exception):
    """A file is no result of `s2moe quality`; the message names it."""


@dataclass(frozen=True)
class Agreement:
    """Committed tokens whose likeliest token is the exact target's."""

    share: float
    """0 … 1."""
    n_positions: int | None = None
    """None: the file does not tell."""

    @property
    def standard_error(self) -> float | None:
        """√(p (1 - p) / n), as if positions were independent."""
        if not self.n_positions:
            return None
        return math.sqrt(self.share * (1 - self.share) / self.n_positions)

    def __str__(self) -> str:
        share, error = f"{100 * self.share:.1f} %", self.standard_error
        if error is None:
            return share
        return f"{share} (standard error {100 * error:.1f}, {self.n_positions} positions)"


@dataclass
class Agreements:
    """By method and memory limit in MiB (None: without a limit)."""

    cells: dict[tuple[str, int | None], Agreement] = field(default_factory=dict)

    def at(self, method: str, limit: int | None) -> Agreement | None:
        return self.cells.get((method, limit))

    def limits(self, method: str) -> list[int | None]:
        return [limit for name, limit in self.cells if name == method]

    def least(self, method: str) -> tuple[int | None, Agreement] | None:
        """The limit with the lowest share. None: the method was not measured."""
        found = [(limit, each) for (name, limit), each in self.cells.items() if name == method]
        return min(found, key=lambda each: each[1].share, default=None)

    def add(self, method: str, limit: int | None, measured: Agreement) -> None:
        """Of two files with the same setting and limit the lower share counts."""
        known = self.at(method, limit)
        if known is None or measured.share < known.share:
            self.cells[method, limit] = measured


def read_agreement(paths: Sequence[Path]) -> Agreements:
    """Raises QualityFileError."""
    agreements = Agreements()
    for path in paths:
        try:
            data = json.loads(path.read_text())
            limit = _limit_mib(data.get("memory", {}))
            for setting in data["settings"]:
                name = _method_name(setting["options"])
                rows = setting["rows"]["all"]
                if name is not None and rows is not None:
                    agreements.add(name, limit, Agreement(float(rows["same_top1"]), rows.get("n_rows")))
        except OSError as error:
            raise QualityFileError(f"--quality: cannot read {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise QualityFileError(f"--quality: {path} is no JSON of `s2moe quality` ({error!r})") from error
    return agreements


def _limit_mib(memory: dict[str, Any]) -> int | None:
    budget_bytes = memory.get("budget_bytes")
    return round(budget_bytes / MIB) if budget_bytes else None


def _method_name(options: dict[str, Any]) -> str | None:
    """None: not a setting that is compared here."""
    rest = set(options) - {"method", "preset", "error_budget"}
    if options.get("method", "s2moe") != "s2moe" or rest:
        return None
    if "error_budget" in options:
        balanced = options.get("preset", "balanced") == "balanced"
        return f"budget-{options['error_budget']:g}" if balanced else None
    preset = options.get("preset", "balanced")
    return preset if isinstance(preset, str) else None
