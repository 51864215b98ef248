"""What the sections of the offloading benchmark share."""

from __future__ import annotations

import itertools
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from s2moe.bench.drive import Drive, DriveSpeed
from s2moe.bench.serving import Samples
from s2moe.bench.targets import Line

POOLS = ("weights", "kv", "compute", "expert_cache")
"""Memory that is the model's; the rest is what the processes cost."""


@dataclass
class Context:
    model: Path
    work: Path
    """A folder on a disk: what lies in a tmpfs is charged as memory."""
    drive: Drive
    n_threads: int
    n_tokens: int
    n_stock_tokens: int
    n_repeats: int
    say: Callable[[str], None]
    lines: list[Line] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    drive_speeds: list[DriveSpeed] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def new_folder(self, name: str) -> Path:
        """An empty folder for one run."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def measure_drive(self) -> float:
        """Bytes per second now."""
        speed = self.drive.measure()
        self.drive_speeds.append(speed)
        return speed.bytes_per_second

    def next_number(self) -> int:
        """For prompts that must not repeat."""
        return next(self._numbers)


def overhead_bytes(peak_rss: dict[str, int], samples: Samples) -> int:
    """What the processes took beside weights, KV cache, compute buffers and filled slots."""
    models = sum(samples.sum("s2moe_memory_used_bytes", pool=pool) for pool in POOLS)
    return sum(peak_rss.values()) - int(models)


def spread(values: list[float]) -> str:
    """`median (least to most)`."""
    median = f"{statistics.median(values):.4g}"
    return median if len(values) == 1 else f"{median} ({min(values):.4g} to {max(values):.4g})"
