"""What the Dockerfiles promise, as far as it can be seen unbuilt: `make images-check` builds them."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
IMAGES = REPOSITORY / "deploy" / "images"
sys.path.insert(0, str(IMAGES))

from buildah import Buildah  # noqa: E402
from check_images import ImageCheck  # noqa: E402
from container import CheckError, ImageConfig  # noqa: E402

DOCKERFILES = ("Dockerfile.orin", "Dockerfile.4090")
LOCKS = ("requirements.txt", "build-requirements.txt", "uv.txt")
BUILT_APART = {"llama-cpp-python"}
"""Built from the release that native/llama_cpp.lock pins."""
PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)

both = pytest.mark.parametrize("dockerfile", DOCKERFILES)


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Word and rest of each instruction, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (REPOSITORY / dockerfile).read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    split = [line.partition(" ") for line in lines if line.strip()]
    return [(word, rest) for word, _, rest in split]


def runtime_stage(dockerfile: str) -> dict[str, str]:
    """The last stage, without what it repeats."""
    words = instructions(dockerfile)
    last = max(index for index, (word, _) in enumerate(words) if word == "FROM")
    return dict(words[last:])


def default_arguments(dockerfile: str) -> dict[str, str]:
    pairs = [rest.split("=", 1) for word, rest in instructions(dockerfile) if word == "ARG" and "=" in rest]
    return dict(pairs)


@both
def test_every_base_image_is_an_argument_with_a_tag(dockerfile: str) -> None:
    defaults = default_arguments(dockerfile)
    bases = [rest.split()[0] for word, rest in instructions(dockerfile) if word == "FROM"]
    assert bases == ["${BUILD_IMAGE}", "${RUNTIME_IMAGE}"]
    for name in ("BUILD_IMAGE", "RUNTIME_IMAGE"):
        assert re.search(r":[\w.-]*\d[\w.-]*$", defaults[name]), defaults[name]


def test_each_image_has_the_code_of_its_chip() -> None:
    assert default_arguments("Dockerfile.orin")["CUDA_ARCHITECTURES"] == "87-real"
    assert default_arguments("Dockerfile.4090")["CUDA_ARCHITECTURES"] == "89-real"


@both
def test_runtime_image_runs_the_server_as_a_user_with_a_health_check(dockerfile: str) -> None:
    stage = runtime_stage(dockerfile)
    assert int(stage["USER"]) > 0
    assert json.loads(stage["ENTRYPOINT"]) == ["tini", "--", "s2moe", "serve"]
    assert stage["VOLUME"] == "/models"
    assert "S2MOE_HOST=0.0.0.0 " in stage["ENV"]
    assert "S2MOE_CACHE_DIR=/models/" in stage["ENV"]
    options, _, command = stage["HEALTHCHECK"].partition(" CMD ")
    assert "--start-period=" in options
    assert json.loads(command) == ["python", "/opt/s2moe/health.py"]


@both
def test_context_has_all_that_is_copied(dockerfile: str) -> None:
    let_through = [
        line.removeprefix("!")
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for word, rest in instructions(dockerfile):
        if word == "COPY" and not rest.startswith("--from="):
            for source in rest.split()[:-1]:
                assert (REPOSITORY / source).exists(), source
                assert any(Path(source).match(pattern) for pattern in let_through), source


@both
def test_everything_from_the_package_index_is_locked(dockerfile: str) -> None:
    installs = re.findall(r"pip install ([^&;]*)", (REPOSITORY / dockerfile).read_text())
    assert len(installs) >= 3
    for flags in installs:
        assert "--require-hashes" in flags or "--no-index" in flags, flags


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_pin_versions_with_hashes(lock: str) -> None:
    text = (IMAGES / lock).read_text()
    pins = PIN.findall(text)
    assert pins
    for requirement in re.split(r"\n(?=[\w.-]+==)", text)[1:]:
        assert "--hash=sha256:" in requirement, requirement


def test_locked_packages_are_what_the_project_asks_for() -> None:
    """Fails when pyproject.toml changed and `make images-lock` was not run."""
    pins = {
        canonicalize_name(name): version for name, version in PIN.findall((IMAGES / LOCKS[0]).read_text())
    }
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["pull"]]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name not in BUILT_APART:
            assert name in pins, f"{name} is not locked; run `make images-lock`"
            assert requirement.specifier.contains(pins[name]), f"{requirement} is not {pins[name]}"


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server whose /health has a status. Gives its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"status":"loading"}'
            self.send_response(status if self.path == "/health" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def health(port: int, host: str = "0.0.0.0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(IMAGES / "health.py")],
        env={**os.environ, "S2MOE_HOST": host, "S2MOE_PORT": str(port)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (404, 1)])
def test_health_check_ends_as_the_server_feels(status: int, code: int) -> None:
    with answering(status) as port:
        result = health(port)
    assert (result.returncode, result.stderr) == (code, "")
    assert "loading" in result.stdout


def test_health_check_fails_where_nothing_listens() -> None:
    with answering(200) as port:
        pass
    result = health(port, "127.0.0.1")
    assert (result.returncode, result.stderr) == (1, "")
    assert f"127.0.0.1:{port}" in result.stdout


INDEX = "https://user:password@index.example/simple"
RECORDER = """#!/bin/sh
printf '%s\\n' "$0 $*" >> "$RECORD"
case " $* " in *" mount "*) echo "$ROOT" ;; esac
"""
"""In place of buildah and debootstrap: notes how it is called."""


def test_the_package_index_of_the_building_machine_is_there_while_it_builds_and_not_in_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, root, record = (tmp_path / name for name in ("programs", "root", "record"))
    programs.mkdir()
    for name in ("buildah", "debootstrap"):
        (programs / name).write_text(RECORDER)
        (programs / name).chmod(0o755)
    (root / "etc/ssl/certs").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(record))
    monkeypatch.setenv("ROOT", str(root))
    monkeypatch.setenv("PIP_INDEX_URL", INDEX)
    buildah = Buildah(tmp_path / "storage")
    base = buildah.make_base("bookworm")
    buildah.build(REPOSITORY / "Dockerfile.4090", "tag", {"BUILD_IMAGE": base}, tmp_path / "log")

    calls = record.read_text()
    assert "debootstrap" in calls
    assert "--env" not in calls
    assert INDEX not in calls
    (mounted,) = re.findall(r" build .*--volume (\S+):/etc/pip\.conf:ro ", calls)
    assert f"index-url = {INDEX}\n" in Path(mounted).read_text()
    assert Path(mounted).stat().st_mode & 0o077 == 0
    assert not (root / "etc/pip.conf").exists()


@pytest.mark.parametrize(
    ("environment", "pip_config", "fault"),
    [
        ({"PIP_INDEX_URL": INDEX}, "", "pip: PIP_INDEX_URL"),
        ({"PIP_CERT": "/etc/ssl/cert.pem"}, "", "pip: PIP_CERT"),
        ({}, f"[global]\nindex-url = {INDEX}\n", "pip: /etc/pip.conf"),
        # what a mount leaves, and so the next check's turn
        ({}, "", "compilers: gcc"),
    ],
    ids=["an index", "a certificate", "a file", "none"],
)
def test_the_check_refuses_an_image_with_settings_of_pip(
    tmp_path: Path, environment: dict[str, str], pip_config: str, fault: str
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/pip.conf").write_text(pip_config)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gcc").touch()
    config = ImageConfig("10001", (), {"PATH": "/bin", **environment}, ("true",), ("/models",), "/")
    with pytest.raises(CheckError, match=f"{fault}$"):
        ImageCheck("image", tmp_path, config, tmp_path).run()
