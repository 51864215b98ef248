"""What pages tell to run is there, and is called so that a shell finds it."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from s2moe.server import cli

from documented import PAGES, ROOT, script

S2MOE = re.compile(r"^(?:sudo (?:-H -u s2moe )?)?(\S*\bs2moe) (.+)$", re.MULTILINE)
"""A line that begins with a command of ours: its program, its arguments."""


def text_of(page: Path) -> str:
    """The blocks of a page, each command on one line."""
    return re.sub(r"\\\n\s*", "", script(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_our_command_is_called_where_setup_puts_it_and_knows_its_arguments(page: Path) -> None:
    """`make setup` puts it on no PATH."""
    for program, arguments in S2MOE.findall(text_of(page)):
        assert program == ".venv/bin/s2moe", f"{program} {arguments}"
        if "[" not in arguments and "…" not in arguments:
            cli.build_parser().parse_args(shlex.split(arguments, comments=True))


def test_each_of_our_commands_is_shown() -> None:
    named = {arguments.split()[0] for page in PAGES for _, arguments in S2MOE.findall(text_of(page))}
    assert {"serve", "pull", "inspect", "profile", "quality", "demo-model"} <= named


def test_modules_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"python -m (s2moe[\w.]+\w)", page.read_text())}
    assert "s2moe.bench.offload" in named
    assert not [name for name in named if find_spec(name) is None]


def test_pages_with_benchmarks_say_what_those_need() -> None:
    for page in PAGES:
        text = text_of(page)
        if re.search(r"^\.venv/bin/python -m (s2moe\.bench|pytest)", text, re.MULTILINE):
            assert "make setup-dev" in page.read_text(), page


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [page.read_text() for page in PAGES]
    named = {
        name for text in texts for name in re.findall(r"(?:^ {4}|`)make ([a-z][\w-]*)", text, re.MULTILINE)
    }
    assert {"serve", "setup", "setup-dev", "cuda"} <= named
    assert named <= targets
