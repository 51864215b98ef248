"""bench/memlimit, as a shell and as a test would use it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

MEMLIMIT = Path(__file__).resolve().parents[2] / "bench" / "memlimit"
MIB = 2**20


def memlimit(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(MEMLIMIT), "--keep-caches", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def cgroups() -> None:
    probe = memlimit("64MiB", "true")
    if probe.returncode == 125:
        pytest.skip(probe.stderr.strip().splitlines()[-1])


def allocate(n_bytes: int) -> list[str]:
    return [sys.executable, "-c", f"print(len(bytearray(b'x') * {n_bytes}))"]


def folders(pid: int) -> list[Path]:
    return list(Path("/sys/fs/cgroup").rglob(f"memlimit.{pid}"))


@pytest.mark.usefixtures("cgroups")
def test_reports_the_peak_of_what_was_charged(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = memlimit("--report", str(report), "300MiB", *allocate(100 * MIB))
    assert result.returncode == 0
    assert result.stdout == f"{100 * MIB}\n"
    numbers = json.loads(report.read_text())
    assert numbers["limit_bytes"] == 300 * MIB
    assert 100 * MIB < numbers["peak_bytes"] < 200 * MIB
    assert numbers["oom_kills"] == 0
    assert f"peak {numbers['peak_bytes']} bytes" in result.stderr.splitlines()[-1]


@pytest.mark.usefixtures("cgroups")
def test_ends_what_takes_more(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = memlimit("--report", str(report), "50MiB", *allocate(100 * MIB))
    assert result.returncode == 128 + signal.SIGKILL
    assert json.loads(report.read_text())["oom_kills"] == 1


@pytest.mark.usefixtures("cgroups")
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["50MiB", "sh", "-c", "exit 7"], 7, "limit 52428800 bytes"),
        (["50MiB", "sh", "-c", "kill -TERM $$"], 128 + signal.SIGTERM, "limit"),
        (["50MiB", "/nowhere/command"], 127, "cannot run /nowhere/command: No such file"),
        (["50MiB", "/etc/hostname"], 126, "cannot run /etc/hostname"),
        (["50XiB", "true"], 125, "'50XiB' is not a size"),
        (["50MiB"], 125, "a command is missing"),
    ],
)
def test_exit_status(arguments: list[str], status: int, message: str) -> None:
    result = memlimit(*arguments)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("cgroups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_passes_signals_on_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    # the command ends by itself at the signal; what it has started would not
    script = "trap 'echo stopped; exit 3' TERM INT; sleep 1000 & echo $!; while :; do sleep 0.02; done"
    process = subprocess.Popen(
        [str(MEMLIMIT), "--keep-caches", "50MiB", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    left_running = int(process.stdout.readline())
    assert folders(process.pid)
    process.send_signal(number)
    assert process.wait(10) == 3
    assert process.stdout.read() == "stopped\n"
    assert not folders(process.pid)
    wait_gone(left_running)


@pytest.mark.usefixtures("cgroups")
def test_takes_the_command_along_when_it_is_killed() -> None:
    process = subprocess.Popen(
        [str(MEMLIMIT), "--keep-caches", "50MiB", "sh", "-c", "echo $$; exec sleep 1000"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    command = int(process.stdout.readline())
    assert folders(process.pid)
    process.kill()
    process.wait()
    wait_gone(command)
    assert memlimit("50MiB", "true").returncode == 0, "the next one cleans up"
    assert not folders(process.pid)


def wait_gone(pid: int) -> None:
    """A zombie counts as gone: whoever inherited it may be slow to reap."""
    deadline = time.monotonic() + 10
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def load_memlimit() -> Any:
    loader = importlib.machinery.SourceFileLoader("memlimit", str(MEMLIMIT))
    spec = importlib.util.spec_from_loader("memlimit", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_files_of_cgroup_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel documents them; the machine of this test may have version 1."""
    module = load_memlimit()
    for name in ("memory.max", "memory.swap.max"):
        (tmp_path / name).write_text("max\n")
    (tmp_path / "memory.peak").write_text("4096\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n")
    monkeypatch.setattr(module, "make_child", lambda: tmp_path)
    limit = module.Limit(5000)
    assert (tmp_path / "memory.max").read_text() == "5000"
    assert (tmp_path / "memory.swap.max").read_text() == "0"
    assert limit.report() == {"limit_bytes": 5000, "peak_bytes": 4096, "oom_kills": 1}


def test_version_2_takes_the_nearest_ancestor_that_can_have_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load_memlimit()
    own = tmp_path / "user.slice" / "session.scope"
    own.mkdir(parents=True)
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    (own.parent / "cgroup.subtree_control").write_text("memory\n")
    # a cgroup with processes in it cannot hand out controllers: here there is not even the file
    monkeypatch.setattr(module, "mounts", lambda: [("cgroup2", "/", tmp_path, {"rw"})])
    monkeypatch.setattr(module, "own_paths", lambda: {"": "/user.slice/session.scope"})
    assert module.make_child().parent == own.parent
    monkeypatch.setattr(module, "mounts", lambda: [("cgroup", "/", tmp_path, {"rw", "cpu"})])
    with pytest.raises(module.LimitError, match="no cgroup hierarchy with the memory controller"):
        module.make_child()
