"""bench/memlimit, as a shell and as a test would use it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
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
    last = result.stderr.splitlines()[-1]
    assert "limit 314572800 bytes (300.0 MiB)" in last
    assert f"peak {numbers['peak_bytes']} bytes ({numbers['peak_bytes'] / MIB:.1f} MiB)" in last


@pytest.mark.usefixtures("cgroups")
def test_report_that_cannot_be_written_is_noticed_before_the_command_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    result = memlimit("--report", str(tmp_path / "none" / "report.json"), "50MiB", "touch", str(ran))
    assert result.returncode == 125
    assert "--report: cannot write" in result.stderr
    assert not ran.exists()


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
        (["--read-limit", "0", "50MiB", "true"], 125, "the limit must not be 0"),
        (["--read-limit-path", "/", "50MiB", "true"], 125, "--read-limit-path needs --read-limit"),
        (
            ["--read-limit", "1GiB", "--read-limit-path", "/proc", "50MiB", "true"],
            125,
            "is on no block device",
        ),
        (
            ["--read-limit", "1GiB", "--read-limit-path", "/nowhere", "50MiB", "true"],
            125,
            "/nowhere: No such",
        ),
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
        # a shell cannot trap what was ignored at its start, as in the background of another shell
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
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
    monkeypatch.setattr(module, "make_child", lambda *_: tmp_path)
    limit = module.MemoryLimit(5000)
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
    assert module.make_child("memory", ("memory",)).parent == own.parent
    monkeypatch.setattr(module, "mounts", lambda: [("cgroup", "/", tmp_path, {"rw", "cpu"})])
    with pytest.raises(module.LimitError, match="no cgroup hierarchy with the memory controller"):
        module.make_child("memory", ("memory",))


def disk_of(path: Path) -> str:
    number = path.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """memlimit with tmp_path/cgroup for its cgroups and a disk 8:0 whose first partition holds tmp_path."""
    module = load_memlimit()
    partition = tmp_path / "devices" / "sda" / "sda1"
    partition.mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    (partition.parent / "dev").write_text("8:0\n")
    links = tmp_path / "block"
    links.mkdir()
    (links / disk_of(tmp_path)).symlink_to("../devices/sda/sda1")
    monkeypatch.setattr(module, "BLOCK_DEVICES", links)
    monkeypatch.setattr(module, "own_paths", lambda: {"memory": "/", "blkio": "/", "": "/"})
    return module


def test_a_throttle_is_for_the_whole_disk(fake: Any, tmp_path: Path) -> None:
    assert fake.whole_disk(tmp_path) == "8:0"
    link = fake.BLOCK_DEVICES / disk_of(tmp_path)
    link.unlink()
    link.symlink_to("../devices/sda")
    assert fake.whole_disk(tmp_path) == disk_of(tmp_path)
    link.unlink()
    with pytest.raises(fake.LimitError, match=r"on no block device .*; pass --read-limit-path"):
        fake.whole_disk(tmp_path)


def kernel_fills(module: Any, monkeypatch: pytest.MonkeyPatch, files: dict[str, list[str]]) -> None:
    """New cgroups get the files of their hierarchy, named by the folder it is mounted on."""
    make_child = module.make_child

    def make(*controllers: Any) -> Path:
        folder: Path = make_child(*controllers)
        for name in files[folder.parent.name]:
            (folder / name).write_text("")
        return folder

    monkeypatch.setattr(module, "make_child", make)


def test_read_limit_of_cgroup_version_1_has_its_own_cgroup(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("memory", "blkio"):
        (tmp_path / name).mkdir()
    rows = [("cgroup", "/", tmp_path / name, {"rw", name}) for name in ("memory", "blkio")]
    monkeypatch.setattr(fake, "mounts", lambda: rows)
    throttle = "blkio.throttle.read_bps_device"
    files = {"memory": ["memory.limit_in_bytes"], "blkio": [throttle, "cgroup.procs"]}
    kernel_fills(fake, monkeypatch, files)
    memory = fake.MemoryLimit(5000, with_reads=True)
    reads = fake.ReadLimit(1 << 30, tmp_path, memory)
    assert memory.folder.parent == tmp_path / "memory"
    assert reads.folder.parent == tmp_path / "blkio"
    assert (reads.folder / throttle).read_text() == "8:0 1073741824"
    reads.enter()
    assert (reads.folder / "cgroup.procs").read_text() == str(os.getpid())


def test_read_limit_of_cgroup_version_2_is_set_beside_the_memory_limit(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "unified"
    root.mkdir()
    (root / "cgroup.subtree_control").write_text("cpu memory\n")
    monkeypatch.setattr(fake, "mounts", lambda: [("cgroup2", "/", root, {"rw"})])
    kernel_fills(fake, monkeypatch, {"unified": ["memory.max", "io.max"]})
    memory = fake.MemoryLimit(5000, with_reads=True)
    assert (root / "cgroup.subtree_control").read_text() == "+io", (
        "what it hands out already is not asked for"
    )
    reads = fake.ReadLimit(1 << 30, tmp_path, memory)
    assert (memory.folder / "io.max").read_text() == "8:0 rbps=1073741824"
    reads.enter()
    reads.remove()
    assert sorted(path.name for path in memory.folder.iterdir()) == ["io.max", "memory.max"]


def test_a_kernel_without_throttles_is_an_error_that_leaves_nothing(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("memory", "blkio"):
        (tmp_path / name).mkdir()
    rows = [("cgroup", "/", tmp_path / name, {"rw", name}) for name in ("memory", "blkio")]
    monkeypatch.setattr(fake, "mounts", lambda: rows)
    kernel_fills(fake, monkeypatch, {"memory": ["memory.limit_in_bytes"], "blkio": []})
    memory = fake.MemoryLimit(5000, with_reads=True)
    with pytest.raises(fake.LimitError, match="lacks CONFIG_BLK_DEV_THROTTLING"):
        fake.ReadLimit(1 << 30, tmp_path, memory)
    assert not list((tmp_path / "blkio").iterdir())


READER = """
import mmap, os, sys, time
file = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
with mmap.mmap(-1, 1 << 20) as buffer:
    started = time.monotonic()
    for place in range(0, 48 << 20, 1 << 20):
        assert os.preadv(file, [buffer], place) == 1 << 20
    print(os.getppid(), time.monotonic() - started)
"""


@pytest.mark.usefixtures("cgroups")
def test_reads_past_the_cache_keep_to_the_limit(tmp_path: Path) -> None:
    """48 MiB at 32 MiB/s: more than a second, which no disk takes without a limit."""
    data = tmp_path / "data"
    data.write_bytes(os.urandom(48 * MIB))
    with data.open("rb") as file:
        os.fsync(file.fileno())
    reader = [sys.executable, "-c", READER, str(data)]
    throttle = ["--read-limit", "32MiB", "--read-limit-path", str(data)]
    free = memlimit("256MiB", *reader)
    if free.returncode != 0:
        pytest.skip(f"O_DIRECT is refused here: {free.stderr.strip().splitlines()[-2]}")
    result = memlimit(*throttle, "256MiB", *reader)
    if result.returncode == 125:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.returncode == 0, result.stderr
    free_seconds = float(free.stdout.split()[1])
    pid, seconds = result.stdout.split()
    assert free_seconds < 1.0 < float(seconds) < 3.0
    assert f"{32 * MIB} bytes per second of disk" in result.stderr.splitlines()[-1]
    assert not folders(int(pid))
