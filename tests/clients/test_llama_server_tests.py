"""Those of llama.cpp's own server tests that make sense for any server.

They are taken from the release that native/llama_cpp.lock pins, unpacked below build/clients and run in
an environment of their own; nothing of them is part of this repository. With DEBUG_EXTERNAL they use a server
that runs already. llama_server_choice.py says which are run on which server, and why the others are not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import install
import llama_server_choice as choice
import pytest
from e2e_rig import ServeProcess
from fake_engine import Action, FakeEngine
from scripted_answers import answer
from threaded_rig import threaded_server

from s2moe.engine.messages import Generate

NAME = "llama-server-tests"
INSIDE = "vendor/llama.cpp/tools/server/tests/"
ALIAS = "tinyllama-2"
REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = install.environment(NAME) / "tests"
LIMIT_SECONDS = 600
_FUNCTION = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


@pytest.fixture(scope="module")
def unit_tests() -> Path:
    """The unpacked tests."""
    command = [sys.executable, str(REPOSITORY / "native" / "prepare.py"), "--archive"]
    archive = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # Debian 12's Python has none; the archive's hash vouches for it
            tar.extraction_filter = tarfile.data_filter
        for member in tar:
            name = member.name.partition("/")[2]
            if name.startswith(INSIDE) and member.isfile():
                member.name = name.removeprefix(INSIDE)
                tar.extract(member, TESTS)
    return TESTS / "unit"


@pytest.fixture(scope="module")
def python(unit_tests: Path) -> Path:
    """The Python of an environment with the tests' own requirements."""
    folder, python = install.environment(NAME), install.python_of(NAME)
    stamp = folder / install.STAMP
    requirements = unit_tests.with_name("requirements.txt")
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(requirements)], check=True)
        stamp.write_text(requirements.read_text())
    return python


def test_each_test_of_the_release_is_selected_or_left_out_with_a_reason(unit_tests: Path) -> None:
    files = {path.name for path in unit_tests.glob("test_*.py")}
    assert files == {*choice.SELECTED, *choice.OTHER_FILES}
    for name, by_server in choice.SELECTED.items():
        functions = set(_FUNCTION.findall((unit_tests / name).read_text()))
        selected = {test for tests in by_server.values() for test in tests}
        assert functions == selected | set(choice.DESELECTED[name]), name


@contextmanager
def model_server(model: Path, folder: Path) -> Iterator[int]:
    log = folder / "log"
    server = ServeProcess(log, "--model", str(model), "--alias", ALIAS, "--ctx-size", "4096")
    try:
        server.wait_ready()
        yield server.port
    finally:
        server.close()


@contextmanager
def scripted_server(**settings: Any) -> Iterator[int]:
    def say(request: Generate) -> Sequence[Action]:
        return answer(request, choice.SAID, reason="length")

    with threaded_server(FakeEngine(say), alias=ALIAS, **settings) as rig:
        yield rig.port


@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.parametrize("server", [choice.MODEL, choice.SCRIPT, choice.KEY])
def test_selected_tests_pass(python: Path, tiny_model_path: Path, tmp_path: Path, server: str) -> None:
    servers: dict[str, Callable[[], Any]] = {
        choice.MODEL: lambda: model_server(tiny_model_path, tmp_path),
        choice.SCRIPT: scripted_server,
        choice.KEY: lambda: scripted_server(api_key=choice.API_KEY),
    }
    with servers[server]() as port:
        result = subprocess.run(
            [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *arguments(server)],
            cwd=TESTS,
            env={**os.environ, "DEBUG_EXTERNAL": "1", "PORT": str(port)},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS - 60,
            check=False,
        )
    print(result.stdout[-2000:])
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2000:]


def arguments(server: str) -> list[str]:
    """Of pytest: the selected tests."""
    selected = [
        f"unit/{name}::{test}"
        for name, by_server in choice.SELECTED.items()
        for test in by_server.get(server, ())
    ]
    for case in choice.DESELECTED_CASES:
        selected += ["--deselect", f"unit/{case}"]
    return selected
