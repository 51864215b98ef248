"""Computes the tables of recommended settings in deploy/jetson/README.md and deploy/rtx4090/README.md.

    .venv/bin/python deploy/settings_table.py            # print them
    .venv/bin/python deploy/settings_table.py --write    # put them into the documents
    .venv/bin/python deploy/settings_table.py --check    # fail if the documents say something else

Figures are what `s2moe inspect` says of a file with the model's header (shapes: model_shapes.toml) and a
memory budget; shares in VRAM and bytes read per token are computed from these.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from header_only_model import Shape, write_header_only

from s2moe.engine.memory import CONTAINER_RESERVE_SHARE

T = TypeVar("T")
R = TypeVar("R")

HERE = Path(__file__).resolve().parent
SHAPES_FILE = HERE / "model_shapes.toml"
JETSON_README = HERE / "jetson" / "README.md"
RTX_4090_README = HERE / "rtx4090" / "README.md"

MIB, GIB = 2**20, 2**30
USUAL_CTX = 8192
LONG_CTXS = (32768, 16384)
"""Contexts worth having where they cost no expert."""
ROUTING_SKEW = 2.5
"""As `inspect` assumes it for its high hit rate: docs/memory-plan.md."""


@dataclass(frozen=True)
class Board:
    """A machine by its memory."""

    name: str
    budget_gib: int
    """For s2moe; the rest is left to the system."""

    @property
    def budget_mib(self) -> int:
        return self.budget_gib * 1024


@dataclass(frozen=True)
class Host:
    """A machine with an RTX 4090, by its memory."""

    name: str
    limit_gib: int
    """Of the container; the rest is left to the system."""

    @property
    def budget_mib(self) -> int:
        """What `--memory-budget auto` makes of the limit."""
        return int(self.limit_gib * 1024 * (1 - CONTAINER_RESERVE_SHARE))


JETSONS = (Board("16 GB", 12), Board("32 GB", 26), Board("64 GB", 56))
RTX_4090_GIB = 22
"""Of 24: the driver, a desktop and the kernels take the rest."""
HOSTS = (Host("32 GB", 26), Host("64 GB", 56))


class SettingsError(Exception):
    """The tables cannot be computed or are not those of the documents; the message is one line."""


@dataclass(frozen=True)
class Plan:
    """What `s2moe inspect --json` says of one model and budget."""

    shape: Shape
    report: dict[str, Any]

    @property
    def fits(self) -> bool:
        return bool(self.report["plan"]["fits"])

    @property
    def all_resident(self) -> bool:
        return bool(self.report["plan"]["slots"] == self.report["plan"]["experts"])

    @property
    def n_ctx(self) -> int:
        return int(self.report["plan"]["n_ctx"])

    @property
    def token_bytes(self) -> int:
        """Of the experts that one token uses."""
        model = self.report["model"]
        return int(model["expert_bytes"] * model["n_expert_used"] / model["n_expert"])

    @property
    def read_bytes(self) -> tuple[float, float]:
        """Read from the drive per token: at the high hit rate that `inspect` assumes, and at the low one."""
        missing = 1 - self.report["plan"]["resident_share"]
        return missing**ROUTING_SKEW * self.token_bytes, missing * self.token_bytes

    @property
    def dense_bytes(self) -> int:
        """Everything but experts, as it would lie in a GPU's memory."""
        return self.pool("weights", "kv", "compute")

    @property
    def whole_bytes(self) -> int:
        return self.dense_bytes + int(self.report["model"]["expert_bytes"])

    @property
    def vram_share(self) -> float:
        """Of the experts, in an RTX 4090: as engine/gpu_plan.py has it. 1 = all."""
        expert_bytes = self.report["model"]["expert_bytes"]
        return min(1.0, (RTX_4090_GIB * GIB - self.dense_bytes) / float(expert_bytes))

    def pool(self, *names: str) -> int:
        return sum(int(self.report["plan"]["pools"][name]) for name in names)


@dataclass(frozen=True)
class Inspector:
    """Runs `s2moe inspect` on header-only files, which it writes into `folder`."""

    folder: Path
    _plans: dict[tuple[str, int, int], Plan] = field(default_factory=dict)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        return read_shapes()

    def write_models(self) -> None:
        for shape in self.shapes:
            write_header_only(self._path(shape), shape)

    def plan(self, shape: Shape, budget_mib: int, n_ctx: int = USUAL_CTX) -> Plan:
        """Raises SettingsError."""
        n_ctx = min(n_ctx, shape.n_ctx_train)
        key = (shape.name, budget_mib, n_ctx)
        if key not in self._plans:
            self._plans[key] = self._inspect(shape, budget_mib, n_ctx)
        return self._plans[key]

    def _inspect(self, shape: Shape, budget_mib: int, n_ctx: int) -> Plan:
        command = [sys.executable, "-m", "s2moe.server", "inspect", str(self._path(shape)), "--json"]
        command += ["--memory-budget", f"{budget_mib}MiB", "--ctx", str(n_ctx)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if not result.stdout.startswith("{"):
            raise SettingsError(f"`s2moe inspect` of {shape.name} failed: {result.stderr.strip()}")
        return Plan(shape, json.loads(result.stdout))

    def best_plan(self, shape: Shape, budget_mib: int, holds_all: Callable[[Plan], bool]) -> Plan:
        """With the longest context for which it still holds all experts, or the usual one."""
        usual = self.plan(shape, budget_mib)
        if holds_all(usual):
            for n_ctx in LONG_CTXS:
                if min(n_ctx, shape.n_ctx_train) > usual.n_ctx:
                    longer = self.plan(shape, budget_mib, n_ctx)
                    if holds_all(longer):
                        return longer
        return usual

    def _path(self, shape: Shape) -> Path:
        return self.folder / f"{shape.name}.gguf"


def read_shapes() -> tuple[Shape, ...]:
    return tuple(Shape(**model) for model in tomllib.loads(SHAPES_FILE.read_text())["model"])


# ── tables ──────────────────────────────────────────────────────────────────────────────────────


def models_table(inspector: Inspector) -> str:
    rows = []
    for plan in _each(lambda shape: inspector.plan(shape, JETSONS[-1].budget_mib), inspector.shapes):
        model = plan.report["model"]
        expert_text = f"{model['bytes_per_expert']['max'] / MIB:.1f} MiB"
        rows.append(
            (
                f"[{plan.shape.name}]({plan.shape.source}), {plan.shape.file_type}",
                _gib(model["file_bytes"]),
                _gib(plan.pool("weights")),
                f"{plan.report['plan']['experts']} × {expert_text}",
                f"{plan.token_bytes / MIB:.0f} MiB",
                f"{plan.pool('kv') / MIB:.0f} MiB for {plan.n_ctx}",
                _gib(plan.report["plan"]["floor_bytes"]),
                _gib(plan.report["plan"]["full_bytes"]),
            )
        )
    return _markdown(
        ("model", "file", "dense weights", "experts", "experts of one token", "KV cache, tokens",
         "least budget", "all in memory from"),
        rows,
    )  # fmt: skip


def jetson_table(inspector: Inspector) -> str:
    rows = []
    pairs = [(board, shape) for board in JETSONS for shape in inspector.shapes]
    plans = _each(
        lambda pair: inspector.best_plan(pair[1], pair[0].budget_mib, lambda plan: plan.all_resident), pairs
    )
    for (board, shape), plan in zip(pairs, plans, strict=True):
        settings = f"`S2MOE_MEMORY_BUDGET={board.budget_gib}GiB` `S2MOE_CTX_SIZE={plan.n_ctx}`"
        rows.append((board.name, shape.name, settings if plan.fits else "–", *_residency(plan)))
    return _markdown(("Orin", "model", "settings", "experts in memory", "read per token", ""), rows)


def rtx_4090_table(inspector: Inspector) -> str:
    rows = []
    pairs = [(host, shape) for host in HOSTS for shape in inspector.shapes]
    plans = _each(
        lambda pair: inspector.best_plan(
            pair[1], pair[0].budget_mib, lambda plan: plan.all_resident and plan.vram_share == 1
        ),
        pairs,
    )
    for (host, shape), plan in zip(pairs, plans, strict=True):
        settings = f"`S2MOE_MEMORY_LIMIT={host.limit_gib}g` `S2MOE_CTX_SIZE={plan.n_ctx}`"
        in_vram = "all" if plan.vram_share == 1 else f"{100 * plan.vram_share:.0f} %"
        sizes = (_gib(plan.whole_bytes), _gib(plan.dense_bytes))
        rows.append((host.name, shape.name, settings if plan.fits else "–", *sizes, in_vram, _share(plan)))
    return _markdown(
        ("host", "model", "settings", "all of it, with KV and buffers", "without its experts",
         "experts in VRAM", "experts in host memory"),
        rows,
    )  # fmt: skip


def _each(function: Callable[[T], R], values: Sequence[T]) -> list[R]:
    """The results in order; `inspect` is a process of its own, so that two run at once."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, values))


def _residency(plan: Plan) -> tuple[str, str, str]:
    if not plan.fits:
        return "–", "–", f"does not fit: needs {_gib(plan.report['plan']['floor_bytes'])}"
    if plan.all_resident:
        return "all", "0", ""
    low, high = plan.read_bytes
    remark = "one token's experts do not fit" if plan.report["plan"]["below_cliff"] else ""
    return _share(plan), f"{low / MIB:.0f} to {high / MIB:.0f} MiB", remark


def _share(plan: Plan) -> str:
    if not plan.fits:
        return "–"
    return "all" if plan.all_resident else f"{100 * plan.report['plan']['resident_share']:.0f} %"


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.1f} GiB"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ── documents ───────────────────────────────────────────────────────────────────────────────────

TABLES: dict[str, tuple[Path, Callable[[Inspector], str]]] = {
    "models": (JETSON_README, models_table),
    "jetson": (JETSON_README, jetson_table),
    "rtx4090": (RTX_4090_README, rtx_4090_table),
}
"""By the name in the markers around a table: its document, and what computes it."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def table_in(document: str, name: str) -> str:
    """What lies between a table's markers. Raises SettingsError."""
    return document[slice(*_span(document, name))].strip()


def with_table(document: str, name: str, table: str) -> str:
    """Raises SettingsError."""
    begin, end = _span(document, name)
    return f"{document[:begin]}\n\n{table}\n\n{document[end:]}"


def _span(document: str, name: str) -> tuple[int, int]:
    begin, end = f"<!-- settings_table.py: {name} -->", f"<!-- end of {name} -->"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise SettingsError(f"a document lacks the markers {begin} and {end}, or has them twice")
    return document.index(begin) + len(begin), document.index(end)


def difference(written: str, computed: str) -> str:
    """The first line of two tables that differs by more than the last digit of a number; "" if none does.

    What the processes take, which the budget pays for first, varies by a few MiB between starts and machines.
    """
    written_lines, computed_lines = written.splitlines(), computed.splitlines()
    for written_line, computed_line in zip(written_lines, computed_lines, strict=False):
        if not _same(written_line, computed_line):
            return f"{written_line!r}, computed {computed_line!r}"
    if len(written_lines) != len(computed_lines):
        return f"{len(written_lines)} rows, computed {len(computed_lines)}"
    return ""


def _same(written: str, computed: str) -> bool:
    written_cells, computed_cells = written.split(" | "), computed.split(" | ")
    return len(written_cells) == len(computed_cells) and all(map(_same_cell, written_cells, computed_cells))


def _same_cell(written: str, computed: str) -> bool:
    if "`" in computed or "](" in computed:  # settings and links have no rounded numbers
        return written == computed
    if _NUMBER.sub("#", written) != _NUMBER.sub("#", computed):
        return False
    pairs = zip(_NUMBER.findall(written), _NUMBER.findall(computed), strict=True)
    return all(abs(float(a) - float(b)) < 1.5 * max(_last_digit(a), _last_digit(b)) for a, b in pairs)


def _last_digit(number: str) -> float:
    """What one unit of it is worth."""
    decimals = number.partition(".")[2]
    return float(10 ** -len(decimals))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="put the tables into the documents")
    what.add_argument("--check", action="store_true", help="fail if the documents have other tables")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            inspector = Inspector(Path(folder))
            inspector.write_models()
            for name, (path, compute) in TABLES.items():
                table = compute(inspector)
                if arguments.write:
                    path.write_text(with_table(path.read_text(), name, table))
                elif arguments.check:
                    if change := difference(table_in(path.read_text(), name), table):
                        where = f"{path.parent.name}/{path.name}"
                        raise SettingsError(
                            f"table {name} of {where} is out of date: {change}; run settings_table.py --write"
                        )
                else:
                    print(f"{name}\n\n{table}\n")
    except SettingsError as error:
        print(f"settings_table: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
