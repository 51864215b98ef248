"""Never slower: each cell, and means over cells, against plain decoding."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from s2moe.bench.speculation.methods import PRESETS
from s2moe.bench.speculation.ratios import Estimate, estimate
from s2moe.bench.speculation.results import Results, limit_name
from s2moe.bench.targets import Line

FLOOR_RATIO: Final = 0.98
"""Of plain decoding."""
ENOUGH_PAIRS: Final = 10
"""For the mean of a limit, a workload or everything; cells are judged with as many as they have."""
_SECTION: Final = "never slower"
_TARGET: Final = f"≥ {FLOOR_RATIO:g} × off"


class Outcome(StrEnum):
    """What an interval says about a bound."""

    SHOWN = "shown"
    """All of it is at or above."""
    MISSED = "missed"
    """All of it is below."""
    NOT_SHOWN = "not shown"
    """It holds the bound, or there is no interval, as of a single pair."""

    @classmethod
    def of(cls, found: Estimate | None, bound: float) -> Outcome:
        if found is None or found.low is None or found.high is None:
            return cls.NOT_SHOWN
        if found.low >= bound:
            return cls.SHOWN
        return cls.MISSED if found.high < bound else cls.NOT_SHOWN

    @property
    def passed(self) -> bool | None:
        """As a line has it: what was not shown was not refuted either."""
        return {Outcome.SHOWN: True, Outcome.MISSED: False, Outcome.NOT_SHOWN: None}[self]


def cell_name(limit: int | None, workload: str) -> str:
    return f"{limit_name(limit)}, {workload}"


def cell_estimates(results: Results, method: str) -> dict[str, Estimate | None]:
    """By the cell's name. None: no pair of it counts."""
    return {
        cell_name(limit, workload): estimate([pair.ratio for pair in pairs if pair.counts])
        for (limit, workload, name), pairs in results.cells.items()
        if name == method
    }


def judge_floor(results: Results) -> list[Line]:
    """Of each preset the cells and the means over all of them, over each limit and over each workload."""
    lines = []
    for method in PRESETS:
        cells = cell_estimates(results, method)
        if cells:
            lines += [*_judge_cells(method, cells), *_judge_margins(results, method)]
    return lines


def _judge_cells(method: str, cells: dict[str, Estimate | None]) -> list[Line]:
    """How many have which outcome, and those by name that were missed or in which no pair counts."""
    outcomes = {name: Outcome.of(found, FLOOR_RATIO) for name, found in cells.items()}
    numbers = {each: sum(outcome == each for outcome in outcomes.values()) for each in Outcome}
    passed = None if numbers[Outcome.NOT_SHOWN] else True
    if numbers[Outcome.MISSED]:
        passed = False
    text = ", ".join(f"{n} {each}" for each, n in numbers.items())
    lines = [Line(_SECTION, f"{method}: {len(cells)} cells", text, _TARGET, passed)]
    for name, found in cells.items():
        if found is None:
            lines.append(Line(_SECTION, f"{method}: {name}", "not shown: no pair counts", _TARGET))
        elif outcomes[name] is Outcome.MISSED:
            lines.append(_line(f"{method}: {name}", found))
    return lines


def _judge_margins(results: Results, method: str) -> list[Line]:
    """Pairs of different cells scatter more than those of one, which makes these intervals wider."""
    margins = [("all cells", results.ratios(method))]
    margins += [(limit_name(limit), results.ratios(method, limits=(limit,))) for limit in results.limits]
    margins += [(workload, results.ratios(method, workload=workload)) for workload in results.workloads]
    lines = []
    for name, ratios in margins:
        found = estimate(ratios)
        if found is None:
            continue
        what = f"{method}: mean of {name}"
        if found.n >= ENOUGH_PAIRS:
            lines.append(_line(what, found))
        else:
            text = f"not shown: {found:.3f} × off, fewer than {ENOUGH_PAIRS}"
            lines.append(Line(_SECTION, what, text, _TARGET))
    return lines


def _line(what: str, found: Estimate) -> Line:
    outcome = Outcome.of(found, FLOOR_RATIO)
    return Line(_SECTION, what, f"{outcome}: {found:.3f} × off", _TARGET, outcome.passed)
