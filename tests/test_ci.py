"""What .ci/run says at its end of tools that are not there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def run_ci(folder: Path, *programs: str, tools_code: int = 0, make_code: int = 0) -> tuple[int, str]:
    """Exit code and last line of .ci/run where there are these programs only. All that it calls is a stub."""

    def stub(name: str, body: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    for program in programs:
        stub(f"bin/{program}", "exit 0")
    stub("bin/id", "echo 1000")  # an ordinary user, who installs nothing
    stub("bin/make", f"exit {make_code}")
    stub("deploy/monitoring/install-tools", f"exit {tools_code}")
    (folder / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci/run", folder / ".ci")
    bash, dirname = shutil.which("bash"), shutil.which("dirname")
    assert bash is not None
    assert dirname is not None
    (folder / "bin/dirname").symlink_to(dirname)
    environment = {"PATH": str(folder / "bin")}
    command = [bash, str(folder / ".ci/run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


def test_what_is_not_there_is_named_at_the_end(tmp_path: Path) -> None:
    code, last = run_ci(tmp_path, "chromium", "ccache", tools_code=1)
    assert code == 0
    assert last.startswith("ci: without ")
    assert "SKIPPED" in last
    words = last.replace(";", " ").split()
    assert {"chromium-driver", "systemd", "prometheus"} <= set(words)
    assert "ccache" not in words


def test_what_is_there_is_not_named(tmp_path: Path) -> None:
    _, last = run_ci(tmp_path, "chromium", "chromedriver", "ccache", "systemd-analyze")
    for name in ("ccache", "chromium", "systemd", "prometheus"):
        assert name not in last


@pytest.mark.parametrize("make_code", [0, 2])
def test_a_failure_stays_one(tmp_path: Path, make_code: int) -> None:
    code, last = run_ci(tmp_path, make_code=make_code)
    assert code == make_code
    assert last.startswith("ci: without ccache")
