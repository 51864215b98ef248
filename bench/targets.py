"""What is measured against what: the best open peer, the required ratios, and one line for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True)
class Peer:
    """BigMoeOnEdge (an expert cache with O_DIRECT reads inside llama.cpp) under one memory limit.

    Measured once on a 2-core x86-64 VM with AVX-512, the cache tuned to the limit, whole process in a memory
    cgroup, caches dropped, greedy, with a drive of 1 GiB/s. It serves as a fixed mark: a run's own drive is
    measured, and the mark scaled by bandwidth / 1 GiB/s. Valid for the 64-expert, top-8 demo model only.
    """

    tokens_per_second: float
    bytes_per_token: float
    required_ratio: float
    """What we must reach of its scaled speed; the aim is AIM_RATIO everywhere."""


PEERS: Final = {
    1050 * MIB: Peer(5.0, 140 * MIB, 1.3),
    1500 * MIB: Peer(8.6, 77 * MIB, 1.3),
    2100 * MIB: Peer(13.5, 27 * MIB, 1.5),
    2800 * MIB: Peer(24.3, 10 * MIB, 1.5),
}
"""By memory limit in bytes."""
PEER_DRIVE_BYTES_PER_SECOND: Final = 1.0 * GIB
AIM_RATIO: Final = 1.5
BOUND_SHARE: Final = 0.85
OVERHEAD_BYTES: Final = 150 * MIB
"""Front end and engine beside weights, KV cache, compute buffers and slots."""
PREFILL_DRIVE_SHARE: Final = 0.70
RESIDENT_PREFILL_RATIO: Final = 0.95
RESIDENT_DECODE_RATIO: Final = 0.97
CONTENTION_SHARE: Final = 0.40
"""One busy process beside one thread per core takes half of one core, on which every step waits: half the
speed is left at best. A tenth is what spinning waits leave."""


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    section: str
    what: str
    measured: str
    target: str = ""
    passed: bool | None = None
    """None: reported, not judged."""


def at_least(section: str, what: str, value: float, target: float, unit: str = "") -> Line:
    return Line(section, what, f"{value:.3g}{unit}", f"≥ {target:.3g}{unit}", value >= target)


def at_most(section: str, what: str, value: float, target: float, unit: str = "") -> Line:
    return Line(section, what, f"{value:.3g}{unit}", f"≤ {target:.3g}{unit}", value <= target)


def table(lines: list[Line]) -> str:
    """Aligned columns, a blank line between sections."""
    rows = [(each.section, each.what, each.measured, each.target, _verdict(each)) for each in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
    text = []
    for index, row in enumerate(rows):
        if index and row[0] != rows[index - 1][0]:
            text.append("")
        columns = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        text.append("  ".join([*columns, row[4]]).rstrip())
    return "\n".join(text)


def _verdict(line: Line) -> str:
    return {None: "", True: "pass", False: "FAIL"}[line.passed]
