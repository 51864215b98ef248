"""What the machine gives: /proc and control groups of both versions, in trees made up here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from s2moe.engine.memory import (
    CONTAINER_RESERVE_BYTES,
    MACHINE_RESERVE_BYTES,
    MIB,
    available_bytes,
    group_limits,
    machine_budget,
    measure_footprint,
    memory_supply,
    resident_bytes,
    total_bytes,
)

V1_UNLIMITED = "9223372036854771712"


class Machine:
    """The root of a file system with what the kernel tells."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo", f"MemTotal: {8000 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {6000 * 1024} kB\n"
        )

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def groups(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def v2(self, path: str, limit: int | str, used: int = 0, cached: int = 0) -> None:
        folder = f"sys/fs/cgroup{path}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {cached}\nactive_file 0\n")

    def v1(self, path: str, limit: int | str, used: int = 0, cached: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory{path}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(
            f"{folder}/memory.stat",
            f"inactive_file 7\nactive_file 7\ntotal_inactive_file 0\ntotal_active_file {cached}\n",
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def limits_of(machine: Machine) -> dict[str, int]:
    return {str(group.path): group.limit_bytes // MIB for group in group_limits(machine.root)}


def test_without_groups_it_is_what_the_kernel_calls_available(machine: Machine) -> None:
    assert available_bytes(machine.root) == 6000 * MIB
    assert total_bytes(machine.root) == 8000 * MIB
    budget = machine_budget(100 * MIB, machine.root)
    # 5 % of 8,000 MiB is more than the least reserve
    assert budget.n_bytes == 6100 * MIB - 400 * MIB
    assert "available" in budget.source
    assert not budget.explicit


def test_supply_of_a_machine_is_its_memory_and_what_is_available_with_our_own_use(machine: Machine) -> None:
    supply = memory_supply(100 * MIB, machine.root)
    assert (supply.limit_bytes, supply.available_bytes) == (8000 * MIB, 6100 * MIB)
    assert supply.limit_source == "the memory of the machine"


def test_supply_of_a_container_is_its_limit(machine: Machine) -> None:
    machine.groups("0::/box")
    machine.v2("/box", 1000 * MIB, used=400 * MIB)
    supply = memory_supply(100 * MIB, machine.root)
    assert (supply.limit_bytes, supply.available_bytes) == (1000 * MIB, 700 * MIB)
    assert supply.limit_source == "the limit in /sys/fs/cgroup/box/memory.max"
    # what the page cache is charged for is ours as well, but no more than the limit
    machine.v2("/box", 1000 * MIB, used=50 * MIB)
    assert memory_supply(100 * MIB, machine.root).available_bytes == 1000 * MIB


def test_small_machine_keeps_the_least_reserve(machine: Machine) -> None:
    machine.write("proc/meminfo", f"MemTotal: {2000 * 1024} kB\nMemAvailable: {1500 * 1024} kB\n")
    assert machine_budget(0, machine.root).n_bytes == 1500 * MIB - MACHINE_RESERVE_BYTES


def test_limit_of_the_own_group_version_2(machine: Machine) -> None:
    machine.groups("0::/system.slice/s2moe.service")
    machine.v2("/system.slice/s2moe.service", 1000 * MIB, used=100 * MIB)
    machine.v2("/system.slice", "max")
    assert limits_of(machine) == {"/sys/fs/cgroup/system.slice/s2moe.service/memory.max": 1000}
    budget = machine_budget(100 * MIB, machine.root)
    assert budget.n_bytes == 1000 * MIB - CONTAINER_RESERVE_BYTES
    assert budget.source == "the limit in /sys/fs/cgroup/system.slice/s2moe.service/memory.max"
    assert available_bytes(machine.root) == 900 * MIB
    assert total_bytes(machine.root) == 1000 * MIB


def test_limit_of_a_group_above_version_2(machine: Machine) -> None:
    machine.groups("0::/user.slice/user-1.slice/session")
    machine.v2("/user.slice/user-1.slice/session", 5000 * MIB)
    machine.v2("/user.slice", 700 * MIB)
    budget = machine_budget(0, machine.root)
    assert budget.n_bytes == 700 * MIB - CONTAINER_RESERVE_BYTES
    assert "/sys/fs/cgroup/user.slice/memory.max" in budget.source


def test_limit_of_a_group_version_1(machine: Machine) -> None:
    machine.groups("9:name=systemd:/elsewhere", "5:cpu,memory:/docker/abc", "0::/")
    machine.v1("/docker/abc", 900 * MIB, used=50 * MIB)
    machine.v1("/docker", V1_UNLIMITED)
    machine.v1("", V1_UNLIMITED)
    assert limits_of(machine) == {"/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": 900}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_container_sees_its_group_at_the_root(machine: Machine, version: str) -> None:
    machine.groups("4:memory:/docker/abc" if version == "v1" else "0::/docker/abc")
    getattr(machine, version)("", 800 * MIB)
    assert list(limits_of(machine).values()) == [800]


def test_group_outside_of_the_namespace_is_left_alone(machine: Machine) -> None:
    machine.groups("0::/../../other")
    machine.v2("", 800 * MIB)
    assert list(limits_of(machine).values()) == [800]


def test_smallest_of_both_versions_counts(machine: Machine) -> None:
    machine.groups("4:memory:/a", "0::/b")
    machine.v1("/a", 900 * MIB)
    machine.write("sys/fs/cgroup/unified/b/memory.max", f"{600 * MIB}\n")
    machine.write("sys/fs/cgroup/unified/b/memory.current", "0\n")
    assert machine_budget(0, machine.root).n_bytes == 600 * MIB - CONTAINER_RESERVE_BYTES


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_what_others_in_the_group_use_is_not_ours_but_page_cache_gives_way(
    machine: Machine, version: str
) -> None:
    machine.groups("4:memory:/a" if version == "v1" else "0::/a")
    getattr(machine, version)("/a", 1000 * MIB, used=900 * MIB, cached=600 * MIB)
    # 300 MiB are used, 100 of them by us
    assert machine_budget(100 * MIB, machine.root).n_bytes == 800 * MIB - CONTAINER_RESERVE_BYTES
    assert available_bytes(machine.root) == 700 * MIB


def test_budget_is_never_negative(machine: Machine) -> None:
    machine.groups("0::/a")
    machine.v2("/a", 10 * MIB)
    assert machine_budget(0, machine.root).n_bytes == 0


def test_machine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert machine_budget(0, tmp_path).n_bytes > 1 << 50
    assert total_bytes(tmp_path) == 0
    assert available_bytes(tmp_path) > 1 << 50


def test_this_machine_gives_something() -> None:
    assert 0 < machine_budget(0).n_bytes < total_bytes()


def test_footprint_is_of_this_process_and_its_parent() -> None:
    alone = measure_footprint(0)
    assert alone.front_end_bytes == 0
    assert 0.5 < alone.engine_bytes / resident_bytes(os.getpid()) < 2
    source = (
        "import os; from s2moe.engine.memory import measure_footprint, resident_bytes; "
        "found = measure_footprint(1); "
        "print(found.front_end_bytes / resident_bytes(os.getppid()), found.engine_bytes > 0)"
    )
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    ratio, counts_itself = result.stdout.split()
    assert 0.5 < float(ratio) < 2
    assert counts_itself == "True"


def test_process_that_has_gone_uses_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert resident_bytes(child.pid) == 0
