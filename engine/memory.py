"""How much memory there is."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 60


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # no such limit, or "max"


def available_bytes() -> int:
    """What this process may still take without swapping: MemAvailable, less under a container limit."""
    available = _UNLIMITED_BYTES
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit_file, used_file in (
        (_CGROUP / "memory.max", _CGROUP / "memory.current"),
        (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
    ):
        limit, used = _number_in(limit_file), _number_in(used_file)
        if limit is not None and used is not None and limit < _UNLIMITED_BYTES:
            available = min(available, max(0, limit - used))
    return available
