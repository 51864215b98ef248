"""The commands of the pages on containers, run word by word with a stand-in for Docker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from documented import PAGES, ROOT, commands, script

DOCKERFILES = (ROOT / "Dockerfile.orin", ROOT / "Dockerfile.4090")
DOCKER_PAGE = ROOT / "docs/docker.md"
PULL_PAGE = ROOT / "docs/models.md"
README = ROOT / "README.md"
GUIDE = ROOT / "deploy/rtx4090/README.md"
COMPOSE = Path("deploy/rtx4090/compose.yml")
FAKE_DOCKER = Path(__file__).with_name("fake_docker.py")
PRIVATE_NAMES = ("S2MOE_MODEL", "S2MOE_API_KEY_FILE", "FAKE_DOCKER")

PROGRAMS = {
    "docker": f'exec {sys.executable} {FAKE_DOCKER} "$@"',
    "sudo": 'echo "$*" >> "$FAKE_DOCKER/as-root"; [ "$1" = chgrp ] && [ "$(id -u)" != 0 ] || exec "$@"',
    "curl": 'echo "$*" >> "$FAKE_DOCKER/curl"',
    "make": "",
    # notes, too, who can read what it writes
    "openssl": 'exec 3>&1; stat -Lc %a /proc/self/fd/3 >> "$FAKE_DOCKER/modes"; echo "0123456789abcdef $*"',
}


@dataclass(frozen=True)
class Machine:
    """A home, a clone of the repository's guide, and a volume."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Machine:
        (folder / "programs").mkdir(parents=True)
        for name, body in PROGRAMS.items():
            path = folder / "programs" / name
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(0o755)
        (folder / "home").mkdir()
        (folder / "clone/deploy").mkdir(parents=True)
        shutil.copytree(GUIDE.parent, folder / "clone/deploy/rtx4090")
        for dockerfile in DOCKERFILES:
            shutil.copy(dockerfile, folder / "clone")
        return cls(folder)

    @property
    def clone(self) -> Path:
        return self.folder / "clone"

    def add_model(self, name: str) -> bytes:
        """As Hugging Face's cache has it: a link to a file elsewhere, which only its owner may read."""
        blob = self.folder / "blobs/abc"
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(b"weights")
        blob.chmod(0o600)
        (self.clone / name).symlink_to("../blobs/abc")
        return blob.read_bytes()

    def run(self, text: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name not in PRIVATE_NAMES}
        environment |= {
            "HOME": str(self.folder / "home"),
            "PATH": f"{self.folder / 'programs'}:{os.environ['PATH']}",
            "FAKE_DOCKER": str(self.folder),
        }
        return subprocess.run(
            ["bash", "-euc", f"umask 022\n{text}"],
            cwd=cwd or self.clone,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.make(tmp_path)


@pytest.fixture
def guided(machine: Machine) -> Machine:
    """After all commands of the guide for the RTX 4090."""
    machine.add_model("model.gguf")
    done = machine.run(script(GUIDE))
    assert done.returncode == 0, done.stderr
    return machine


def group_of_the_image() -> int:
    """Of the user that both images run as."""
    found = set()
    for dockerfile in DOCKERFILES:
        text = dockerfile.read_text()
        gid = re.search(r"groupadd --gid (\d+) s2moe", text)
        uid = re.search(r"useradd --uid (\d+) --gid s2moe ", text)
        assert gid is not None
        assert uid is not None
        assert re.search(rf"^USER {uid[1]}$", text, re.MULTILINE)
        found.add(int(gid[1]))
    (group,) = found
    return group


def check_key(machine: Machine) -> None:
    """Read by its owner and the container's group, by nobody else, and at no time; then sent."""
    path = machine.folder / "home/.config/s2moe/api_key"
    assert path.read_text().startswith("0123456789abcdef")
    assert path.stat().st_mode & 0o777 == 0o640
    assert machine.lines("modes") == ["600"]
    (change,) = (line for line in machine.lines("as-root") if line.startswith("chgrp "))
    assert change.split()[1] == str(group_of_the_image())
    if os.geteuid() == 0:
        assert path.stat().st_gid == group_of_the_image()
    (asked,) = machine.lines("curl")
    assert "Authorization: Bearer 0123456789abcdef" in asked


def test_the_guide_s_key_is_for_its_maker_and_the_container_alone(guided: Machine) -> None:
    check_key(guided)


def test_the_docker_page_leaves_its_key_and_its_model_outside_the_clone(machine: Machine) -> None:
    content = machine.add_model("m.gguf")
    before = sorted(machine.clone.rglob("*"))
    done = machine.run(script(DOCKER_PAGE))
    assert done.returncode == 0, done.stderr
    check_key(machine)
    assert sorted(machine.clone.rglob("*")) == before
    models = machine.folder / "home/models"
    assert (models / "m.gguf").read_bytes() == content
    assert (models / "cache").is_dir()


@pytest.mark.parametrize("page", [README, PULL_PAGE], ids=lambda page: page.name)
def test_docker_knows_what_a_page_asks_of_it(page: Path, machine: Machine) -> None:
    machine.add_model("m.gguf")
    lines = [line for line in commands(page, "docker") if "models:/models" in line or " -t " in line]
    assert lines
    done = machine.run("\n".join(lines))
    assert done.returncode == 0, done.stderr
    for line in commands(page, "docker stop"):
        assert machine.run(line).returncode == 0


def test_the_readme_builds_an_image_without_a_gpu_and_serves_from_it(machine: Machine) -> None:
    (build,) = (line for line in commands(README, "docker build") if "CUDA=OFF" in line)
    bases = re.findall(r"--build-arg (\w+_IMAGE)=(\S+)", build)
    assert {name for name, _ in bases} == {"BUILD_IMAGE", "RUNTIME_IMAGE"}
    assert len({base for _, base in bases}) == 1
    (tag,) = re.findall(r"-t (\S+)", build)
    (serve,) = (line for line in serving() if tag in line)
    assert "--runtime" not in serve
    assert machine.run(build.replace("RUNTIME_IMAGE=", "RUNTIME=")).returncode != 0


def serving() -> list[str]:
    """What starts a server in a container, on all pages."""
    lines = [line for page in PAGES for line in commands(page, "docker run")]
    return [line for line in lines if "--entrypoint" not in line and "s2moe:" in line]


def test_containers_have_a_name_to_stop_and_are_removed() -> None:
    assert len(serving()) >= 6
    for line in serving():
        assert " --rm --name s2moe " in line, line
    for page in (README, DOCKER_PAGE):
        assert commands(page, "docker stop") == ["docker stop s2moe"] * len(commands(page, "docker stop"))
        assert commands(page, "docker stop")


def test_a_gpu_is_asked_for_in_one_way() -> None:
    lines = serving()
    assert not [line for line in lines if "--gpus" in line]
    assert all("--runtime nvidia" in line for line in lines if "--device cuda" in line)


def test_the_guide_goes_through_all_that_compose_is_asked(guided: Machine) -> None:
    calls = [line.removeprefix(f"compose -f {COMPOSE} ") for line in guided.lines("calls")]
    assert [call for call in calls if not call.startswith("run ")] == [
        "build", "up -d", "ps", "logs", "stop", "down",
    ]  # fmt: skip


@pytest.mark.parametrize("subcommand", ["ps", "logs", "down", "up -d"])
def test_compose_finds_its_variables_from_any_folder(subcommand: str, guided: Machine) -> None:
    command = f"docker compose -f {guided.clone / COMPOSE} {subcommand}"
    assert guided.run(command, cwd=guided.folder / "home").returncode == 0
    (guided.clone / COMPOSE).with_name(".env").unlink()
    assert "required variable" in guided.run(command).stderr


def test_git_ignores_the_settings_of_a_machine(guided: Machine) -> None:
    checked = guided.run(f"git init -q . && git check-ignore {COMPOSE.with_name('.env')}")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("page", [README, GUIDE], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_model_that_is_a_private_link_can_be_read_in_the_volume(page: Path, machine: Machine) -> None:
    copies = [line for line in commands(page, "docker run") if "--entrypoint install" in line]
    assert copies
    for line in copies:
        (name,) = re.findall(r"realpath ([\w.]+)\)", line)
        content = machine.add_model(name)
        done = machine.run(line)
        assert done.returncode == 0, done.stderr
        copy = machine.folder / "volumes/models" / name
        assert not copy.is_symlink()
        assert copy.read_bytes() == content
        assert copy.stat().st_mode & 0o777 == 0o644


def test_no_page_copies_a_model_with_its_mode() -> None:
    for page in (README, DOCKER_PAGE, GUIDE):
        assert not [line for line in commands(page, "docker run") if "--entrypoint cp" in line], page
