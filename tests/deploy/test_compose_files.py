"""Every compose file of deploy/ against the Compose specification, and against Compose itself where it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compose_program import COMPOSE, needs_compose
from documented import ROOT

FILES = sorted(ROOT.glob("deploy/*/compose.yml"))
VALUES = {"S2MOE_MODEL": "model.gguf", "S2MOE_API_KEY_FILE": "/etc/s2moe/api_key"}
"""Of the variables that a file requires."""

each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)


def check(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_there_are_compose_files() -> None:
    assert {file.parent.name for file in FILES} >= {"rtx4090", "monitoring"}


@each
def test_it_is_one_by_the_specification(file: Path) -> None:
    result = check(file)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("stop_grace_period: 20s", "stop_grace_perod: 20s"),
        ("read_only: true", "read_only: [true]"),
        ("secrets:\n  api_key:\n    file:", "secrets:\n  api_key:\n    path:"),
    ],
    ids=["a key", "a type", "a secret"],
)
def test_what_the_specification_does_not_have_is_noticed(right: str, wrong: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy/rtx4090/compose.yml").read_text()
    assert right in text
    file = tmp_path / "compose.yml"
    file.write_text(text.replace(right, wrong))
    assert check(file).returncode == 1


def config(file: Path, folder: Path, values: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What Compose makes of it, asked from another folder."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **values}
    command = [*COMPOSE, "-f", str(file), "config"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@needs_compose
@each
def test_compose_takes_it(file: Path, tmp_path: Path) -> None:
    required = set(re.findall(r"\$\{(\w+):\?", file.read_text()))
    result = config(file, tmp_path, {name: VALUES[name] for name in required})
    assert result.returncode == 0, result.stderr
    for name in required:
        assert "required variable" in config(file, tmp_path, dict.fromkeys(required - {name}, "x")).stderr


@needs_compose
def test_compose_reads_the_settings_beside_the_file(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "rtx4090", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    file = Path(shutil.copy(ROOT / "deploy/rtx4090/compose.yml", folder))
    lines = [f"{name}={value}" for name, value in {**VALUES, "S2MOE_CTX_SIZE": "16384"}.items()]
    (folder / ".env").write_text("\n".join(lines))
    result = config(file, elsewhere, {})
    assert result.returncode == 0, result.stderr
    assert "S2MOE_MODEL: /models/model.gguf" in result.stdout
    assert 'S2MOE_CTX_SIZE: "16384"' in result.stdout
