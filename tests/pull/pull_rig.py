"""`s2moe pull` in this process, against a fake hub, and as a process of its own."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import MODEL, REPO, FakeHub

from s2moe.server.pull.choice import RemoteFile
from s2moe.server.pull.download import part_path, pull
from s2moe.server.pull.errors import PullError
from s2moe.server.pull.hub import Hub


class Said:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[int] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def start(self, name: str, size_bytes: int, done_bytes: int) -> None:
        self.steps.append(done_bytes)

    def at(self, done_bytes: int) -> None:
        self.steps.append(done_bytes)

    def stop(self) -> None:
        pass


def pulled(hub: FakeHub, directory: Path, wanted: str | None = None, said: Said | None = None) -> Path:
    return pull(Hub(hub.url), REPO, wanted, directory, said or Said())


def failure_of(hub: FakeHub, directory: Path, wanted: str | None = None) -> PullError:
    """The error of a pull that must fail: one line."""
    with pytest.raises(PullError) as caught:
        pulled(hub, directory, wanted)
    assert "\n" not in str(caught.value)
    return caught.value


def parts_in(directory: Path) -> list[Path]:
    """What downloads that did not end have left."""
    return sorted(directory.glob("*.part"))


def part_of_model(hub: FakeHub, directory: Path) -> Path:
    """Where a download of MODEL grows."""
    content = hub.files[MODEL]
    return part_path(RemoteFile(MODEL, len(content), hashlib.sha256(content).hexdigest()), directory)


def start_pull(url: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """The command as a process. It takes no settings from outside."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "S2MOE_"))
    }
    environment |= {"HF_ENDPOINT": url, "HF_HOME": "/nonexistent", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "s2moe.server", "pull", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
