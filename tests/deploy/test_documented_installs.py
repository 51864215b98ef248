"""What pages tell to install from the package index is what pyproject.toml asks for."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement

from documented import PAGES, ROOT, commands

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PIPS = (
    *("pip", ".venv/bin/pip", "sudo .venv/bin/pip", "~/openai/bin/pip"),
    *("python -m pip", ".venv/bin/python -m pip"),
)
INSTALLS = [(page, line) for page in PAGES for pip in PIPS for line in commands(page, f"{pip} install")]


def requirements(line: str) -> list[Requirement]:
    words = shlex.split(line, comments=True)
    found = []
    for word in words[words.index("install") + 1 :]:
        try:
            found.append(Requirement(word))
        except InvalidRequirement:
            assert word.startswith(("-", ".")), line
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/models.md", "deploy/jetson/README.md"])
def test_the_extra_of_pull_is_named_whole_and_with_its_versions(page: str) -> None:
    (line,) = (line for path, line in INSTALLS if path == ROOT / page and "huggingface" in line)
    wanted = {str(Requirement(text)) for text in EXTRAS["pull"]}
    assert {str(requirement) for requirement in requirements(line)} == wanted


@pytest.mark.parametrize(("page", "line"), INSTALLS, ids=lambda value: getattr(value, "name", ""))
def test_what_is_installed_is_a_dependency_of_the_project(page: Path, line: str) -> None:
    asked_for = [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
    known = {str(Requirement(text)) for text in asked_for}
    for requirement in requirements(line):
        if requirement.name == PROJECT["name"]:
            assert requirement.extras <= set(EXTRAS), f"{page}: {line}"
        else:
            assert str(requirement) in known, f"{page}: {line}"


def test_extras_that_pages_name_exist() -> None:
    named = {
        (page.name, name)
        for page in PAGES
        for text in [page.read_text()]
        for names in re.findall(r"the extra `([\w-]+)`|(?:s2moe|\.)\[([\w,-]+)\]", text)
        for name in "".join(names).split(",")
    }
    assert ("models.md", "pull") in named
    assert {name for _, name in named} <= set(EXTRAS), named
