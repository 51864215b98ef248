"""How many threads may compute without fighting over cores."""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")


def _cgroup_quota_cores() -> float | None:
    """The container's CPU limit in cores (cgroup v2 or v1), None when there is none."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (_CGROUP / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (_CGROUP / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return int(quota) / int(period)


def default_thread_count() -> int:
    """One thread per physical core that this process may use, within the container's CPU limit.

    Threads wait for each other by spinning, so one thread more than there are cores costs most of the speed.
    """
    usable = os.sched_getaffinity(0)
    cores = set()
    for cpu in usable:
        try:
            cores.add((_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    count = len(cores)
    quota = _cgroup_quota_cores()
    return count if quota is None else max(1, min(count, int(quota)))


def processor_name() -> str:
    """What the kernel calls the processor, on x86 its model, elsewhere part numbers, or ""."""
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        return ""
    first, _, _ = text.partition("\n\n")
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    if name := named.get("model name"):
        return name
    return " ".join(named[key] for key in ("CPU implementer", "CPU part", "CPU revision") if key in named)
