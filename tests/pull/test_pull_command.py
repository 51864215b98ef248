"""The command line: usage, help, the missing extra, what is printed where."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fake_hub import MODEL, REPO, FakeHub
from pull_rig import start_pull

from s2moe.server.cli import main
from s2moe.server.pull import errors
from s2moe.server.pull.command import REQUIREMENTS, _this_program
from s2moe.server.pull.errors import PullError
from s2moe.server.pull.progress import LineProgress, progress_on, size_text


@pytest.mark.parametrize(
    "name", ["moe", "acme/", "acme/moe/Q4_K_M", "acme/moe:", "https://huggingface.co/acme/moe"]
)
def test_what_is_no_repo_is_wrong_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["pull", name])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "owner/name:Q4_K_M" in error


def test_help_has_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pull", "--help"])
    text = capsys.readouterr().out
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, PullError)]
    assert len({kind.exit_code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert f" {kind.exit_code} " in text


def test_missing_package_is_said_with_the_command_that_installs_it() -> None:
    program = (
        "import sys; sys.modules['huggingface_hub'] = None; "
        f"from s2moe.server.cli import main; main(['pull', '{REPO}'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert f"{sys.executable} -m pip install {shlex.join(REQUIREMENTS)}" in done.stderr


def test_requirements_are_those_of_the_extra() -> None:
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        assert tuple(tomllib.load(file)["project"]["optional-dependencies"]["pull"]) == REQUIREMENTS


def test_serve_command_is_all_that_stdout_gets(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "my models"
    process = start_pull(hub.url, f"{REPO}:q4_k_m", "--dir", str(folder), HF_TOKEN="hf_secret")
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    program = [sys.executable, "-m", "s2moe.server"]  # as start_pull() calls it
    assert shlex.split(out) == [*program, "serve", "--model", str(folder / MODEL)]
    assert out.count("\n") == 1
    # not a terminal: whole lines, no bar
    assert "\r" not in error
    assert f"{MODEL}: 100 %, 200.0 kB of 200.0 kB" in error
    assert hub.seen[0].token == "Bearer hf_secret"


@pytest.mark.parametrize(
    ("called", "path", "shown"),
    [
        (".venv/bin/s2moe", "/usr/bin", ".venv/bin/s2moe"),
        ("{folder}/s2moe", "/usr/bin", "{folder}/s2moe"),
        ("{folder}/s2moe", "{folder}", "s2moe"),  # found on the PATH
    ],
)
def test_serve_command_names_the_program_as_it_was_called(
    called: str, path: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "s2moe"
    program.touch(0o755)
    monkeypatch.setenv("PATH", path.format(folder=tmp_path))
    monkeypatch.setattr(sys, "argv", [called.format(folder=tmp_path), "pull", REPO])
    assert _this_program() == [shown.format(folder=tmp_path)]


def test_models_go_to_the_cache_directory_unless_told_otherwise(hub: FakeHub, tmp_path: Path) -> None:
    process = start_pull(hub.url, REPO, S2MOE_CACHE_DIR=str(tmp_path))
    process.communicate(timeout=120)
    assert (tmp_path / "models" / MODEL).read_bytes() == hub.files[MODEL]


def all_shown(terminal: int) -> str:
    """What was written to a terminal whose other end is closed. Closes this one."""
    pieces = []
    with contextlib.suppress(OSError):  # EIO: that was all
        while piece := os.read(terminal, 65536):
            pieces.append(piece)
    os.close(terminal)
    return b"".join(pieces).decode()


def test_terminal_gets_a_bar(hub: FakeHub, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        progress = progress_on(terminal)
        progress.start(MODEL, 1000, 250)
        progress.at(500)
        progress.say("trying again")
        progress.stop()
    shown = all_shown(ours)
    assert "\r" in shown
    assert MODEL in shown
    assert "50%" in shown
    # above the bar, in a line of its own
    assert "\rtrying again\r\n" in shown


def test_lines_are_told_now_and_then() -> None:
    out = io.StringIO()
    rare = LineProgress(out, every_seconds=1000)
    rare.start(MODEL, 10**9, 0)
    for done in range(0, 10**9, 10**8):
        rare.at(done)
    assert out.getvalue() == ""
    rare.stop()
    assert out.getvalue().startswith(f"{MODEL}: 90 %, 900.0 MB of 1.00 GB, ")
    often = LineProgress(out, every_seconds=0)
    often.start(MODEL, 10, 0)
    often.at(5)
    assert f"{MODEL}: 50 %" in out.getvalue()


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0.0 kB"),
        (1500, "1.5 kB"),
        (98_500_000, "98.5 MB"),
        (4_213_512_192, "4.21 GB"),
        (1.2e11, "120 GB"),
    ],
)
def test_sizes_are_decimal(n_bytes: float, text: str) -> None:
    assert size_text(n_bytes) == text
