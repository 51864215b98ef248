"""How much memory this machine gives us, and how much of it we use.

What we may use is the least of what the kernel calls available and of the limits of all control groups above
this process (version 1 and 2): a container's limit, a systemd unit's, a user's. On a machine whose GPU shares
the memory, such as a Jetson, it is the same number.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
_UNLIMITED_BYTES = 1 << 60
_PAGE_BYTES = resource.getpagesize()

MACHINE_RESERVE_BYTES = 256 * MIB
MACHINE_RESERVE_SHARE = 0.05
"""Left to the rest of a machine of which we take everything else: other processes grow, and a kernel that has
no page cache left reads programs from the drive again and again. The larger of the two counts."""
CONTAINER_RESERVE_BYTES = 32 * MIB
CONTAINER_RESERVE_SHARE = 0.02
"""Left of a control group's limit, which counts what the resident set does not: page tables (0.2 %), socket
buffers, the pages of files that are read. The larger of the two counts."""


@dataclass(frozen=True)
class _GroupFiles:
    """Where a version of control groups keeps a group's limit and use."""

    controller: str
    """As /proc/self/cgroup names it."""
    mounts: tuple[str, ...]
    limit: str
    used: str


_VERSIONS = (
    _GroupFiles("", ("sys/fs/cgroup", "sys/fs/cgroup/unified"), limit="memory.max", used="memory.current"),
    _GroupFiles(
        "memory",
        ("sys/fs/cgroup/memory",),
        limit="memory.limit_in_bytes",
        used="memory.usage_in_bytes",
    ),
)


@dataclass(frozen=True)
class GroupLimit:
    """The memory limit of one control group."""

    path: Path
    limit_bytes: int
    used_bytes: int
    """Without the page cache, which gives way."""

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class Budget:
    """How much memory front end and engine may take together."""

    n_bytes: int
    source: str
    """Who says so, for people: a flag, a control group, the machine."""
    explicit: bool = False
    """The operator chose it."""


@dataclass(frozen=True)
class Supply:
    """The memory that there is for front end and engine, whatever the budget says."""

    limit_bytes: int
    """What they can never have more than."""
    limit_source: str
    """Who says so, for people."""
    available_bytes: int
    """What they could have now: what is free and what they use already."""


def memory_supply(own_bytes: int, root: Path = Path("/")) -> Supply:
    """`own_bytes` is what the processes of the service take already; `root` as for machine_budget()."""
    limits = [(group.limit_bytes, f"the limit in {group.path}") for group in group_limits(root)]
    total = _meminfo_bytes("MemTotal", root)
    if total is not None:
        limits.append((total, "the memory of the machine"))
    limit_bytes, source = min(limits, default=(_UNLIMITED_BYTES, "a machine that does not tell its memory"))
    return Supply(limit_bytes, source, min(limit_bytes, available_bytes(root) + own_bytes))


def machine_budget(own_bytes: int, root: Path = Path("/")) -> Budget:
    """What the machine gives, less a reserve.

    `own_bytes` is what the processes of the service take already, which is not available any more; `root` is
    where /proc and /sys lie.
    """
    reserve = max(MACHINE_RESERVE_BYTES, int(MACHINE_RESERVE_SHARE * total_bytes(root)))
    available = _meminfo_bytes("MemAvailable", root)
    budgets = []
    if available is not None:
        budgets.append(Budget(max(0, available + own_bytes - reserve), "what the machine has available"))
    for group in group_limits(root):
        reserve = max(CONTAINER_RESERVE_BYTES, int(CONTAINER_RESERVE_SHARE * group.limit_bytes))
        n_bytes = min(group.limit_bytes, group.free_bytes + own_bytes) - reserve
        budgets.append(Budget(max(0, n_bytes), f"the limit in {group.path}"))
    if not budgets:
        return Budget(_UNLIMITED_BYTES, "a machine that does not tell its memory")
    return min(budgets, key=lambda each: each.n_bytes)


def available_bytes(root: Path = Path("/")) -> int:
    """What this process may still take without swapping: MemAvailable, less under a container's limit."""
    amounts = [group.free_bytes for group in group_limits(root)]
    available = _meminfo_bytes("MemAvailable", root)
    return min([*amounts, _UNLIMITED_BYTES if available is None else available])


def total_bytes(root: Path = Path("/")) -> int:
    """The memory of the machine or of the container, whichever is smaller; 0 when it cannot be told."""
    amounts = [group.limit_bytes for group in group_limits(root)]
    total = _meminfo_bytes("MemTotal", root)
    return min([*amounts, total] if total is not None else amounts, default=0)


def group_limits(root: Path = Path("/")) -> list[GroupLimit]:
    """The limits of every control group that this process is in, from its own up to the root of the mount.

    A container sees its own group as that root, but /proc/self/cgroup may name it by the path outside: what
    is not there is passed over, and the root is looked at in any case.
    """
    found: dict[Path, GroupLimit] = {}
    for version, folder in _group_folders(root):
        limit, used = _number_in(folder / version.limit), _number_in(folder / version.used)
        if limit is None or used is None or limit >= _UNLIMITED_BYTES:
            continue
        used = max(0, used - _page_cache_bytes(folder))
        path = folder / version.limit
        found[path] = GroupLimit(Path("/") / path.relative_to(root), limit, used)
    return list(found.values())


@dataclass(frozen=True)
class Footprint:
    """What the two processes of a service have resident, in bytes."""

    front_end_bytes: int
    engine_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.front_end_bytes + self.engine_bytes


def measure_footprint(front_end_bytes: int) -> Footprint:
    """Of this process and of its parent, the front end. `front_end_bytes` is what that one measured itself;
    0: it does not count."""
    if front_end_bytes:
        front_end_bytes = resident_bytes(os.getppid()) or front_end_bytes
    return Footprint(front_end_bytes, resident_bytes())


def resident_bytes(pid: int | None = None) -> int:
    """The resident set of a process, None = this one; 0 when there is none of that number."""
    try:
        with open(f"/proc/{pid or 'self'}/statm", encoding="ascii") as file:  # noqa: PTH123 - no Path per call
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _group_folders(root: Path) -> Iterator[tuple[_GroupFiles, Path]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for version in _VERSIONS:
        paths = ["/"]
        for line in lines:
            _, controllers, path = line.split(":", 2)
            # a group outside of our namespace is shown with dots, and is out of reach
            if version.controller in controllers.split(",") and ".." not in path.split("/"):
                paths.append(path)
        for mount in (root / name for name in version.mounts):
            for path in paths:
                folder = mount / path.strip("/")
                while folder.is_relative_to(mount):
                    yield version, folder
                    folder = folder.parent


def _page_cache_bytes(folder: Path) -> int:
    """Pages of files that a control group is charged for and gives back under pressure."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines)
    # version 1 counts the groups below it under names of their own
    prefix = "total_" if "total_inactive_file" in values else ""
    return sum(int(values.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


def _meminfo_bytes(name: str, root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # no such file, or "max"
