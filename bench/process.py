"""What the kernel knows about a process that is being measured."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MEMLIMIT = Path(__file__).resolve().with_name("memlimit")
EXIT_NO_LIMIT = 125
"""memlimit's status where cgroups cannot be written."""


@dataclass(frozen=True)
class ReadLimit:
    """A throttle on reads from one disk."""

    bytes_per_second: int
    path: Path
    """Anything on that disk."""


@dataclass(frozen=True)
class LimitReport:
    """What memlimit found when the command had ended."""

    limit_bytes: int
    peak_bytes: int | None
    oom_kills: int | None
    read_limit_bytes_per_second: int | None = None

    @classmethod
    def read(cls, path: Path) -> LimitReport:
        return cls(**json.loads(path.read_text()))


def limited(
    command: list[str],
    limit_bytes: int,
    report: Path | None,
    *,
    keep_caches: bool = False,
    read_limit: ReadLimit | None = None,
) -> list[str]:
    """The command that runs `command` under a memory limit, and a read limit if there is one, the page cache
    dropped first."""
    flags = ["--keep-caches"] if keep_caches else []
    if report is not None:
        flags += ["--report", str(report)]
    if read_limit is not None:
        flags += ["--read-limit", str(read_limit.bytes_per_second), "--read-limit-path", str(read_limit.path)]
    return [sys.executable, str(MEMLIMIT), *flags, str(limit_bytes), *command]


def wait_for_child(pid: int, timeout_seconds: float = 60.0) -> int:
    """Pid of the first child of a process. Raises TimeoutError when it does not come."""
    deadline = time.monotonic() + timeout_seconds
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (pids := children.read_text().split()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} started no other within {timeout_seconds:g} s")
        time.sleep(0.01)
    return int(pids[0])


def read_bytes(pid: int) -> int:
    """Bytes that the block layer has read for a process: O_DIRECT, page faults and readahead alike."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/{pid}/io has no read_bytes; this kernel lacks CONFIG_TASK_IO_ACCOUNTING")


def peak_rss_bytes(pid: int) -> int:
    """The largest resident set that a process ever had, pages shared with others included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no VmHWM")
