"""Builds images with buildah in a storage of its own: without container engine and registry."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from container import CheckError, ImageConfig

CA_BUNDLE = Path("etc/ssl/certs/ca-certificates.crt")
PIP_CONFIG = Path("etc/pip.conf")
SHOWN = re.compile(r"(?:\[\d+/\d+\] )?STEP \d+/\d+: \S.{0,80}|native: .*")


def say(text: str) -> None:
    print(f"images: {text}", file=sys.stderr, flush=True)


def pip_options() -> dict[str, str]:
    """How pip reaches this machine's package index: for building and trying images, and in none of them."""
    options = {"cert": f"/{CA_BUNDLE}"}
    if index := os.environ.get("PIP_INDEX_URL"):
        options["index-url"] = index
    return options


class Buildah:
    """One storage below `folder`, which may be deleted as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        temporary = folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        policy = folder / "policy.json"
        policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
        self._policy = ("--signature-policy", str(policy))
        # vfs copies where others mount, and so works in any file system and in containers
        self._command = ("buildah", "--storage-driver", "vfs", "--root", str(folder / "storage"))
        self._command += ("--runroot", str(folder / "run"))
        self._environment = {**os.environ, "TMPDIR": str(temporary), "BUILDAH_ISOLATION": "chroot"}

    def make_base(self, suite: str) -> str:
        """A Debian of a release, made on this machine unless it is there. Returns its name."""
        name = f"localhost/s2moe-debian-{suite}"
        if self._has(name):
            return name
        say(f"making a base image with debootstrap ({suite})")
        container = self._ask("from", *self._policy, "scratch")
        try:
            root = Path(self._ask("mount", container))
            command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", suite, str(root)]
            self._run(command, self._folder / "debootstrap.log")
            for package in (root / "var/cache/apt/archives").glob("*.deb"):
                package.unlink()
            # networks with a proxy of their own sign what passes through it
            if (Path("/") / CA_BUNDLE).exists():
                shutil.copy(Path("/") / CA_BUNDLE, root / CA_BUNDLE)
            self._ask("commit", *self._policy, "--quiet", container, name)
        finally:
            self._ask("rm", container)
        return name

    def build(self, dockerfile: Path, tag: str, arguments: Mapping[str, str], log: Path) -> None:
        command = [*self._command, "build", *self._policy, "--isolation", "chroot", "--format", "docker"]
        command += ["--pull-never", "--tag", tag, "--file", str(dockerfile)]
        # while it builds; of a mounted file an image keeps its name, and nothing else
        command += ["--volume", f"{self._write_pip_config()}:/{PIP_CONFIG}:ro"]
        for name, value in arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        self._run([*command, str(dockerfile.parent)], log)

    def inspect(self, tag: str) -> ImageConfig:
        described = json.loads(self._ask("inspect", "--type", "image", tag))
        return ImageConfig.from_docker(described["Docker"]["config"])

    @contextmanager
    def mounted(self, tag: str) -> Iterator[Path]:
        """The image's file system, writable; what is written is dropped."""
        container = self._ask("from", *self._policy, "--pull-never", tag)
        try:
            yield Path(self._ask("mount", container))
        finally:
            self._ask("rm", container)

    def remove(self, tag: str) -> None:
        self._ask("rmi", "--force", tag)

    def _write_pip_config(self) -> Path:
        file = self._folder / "pip.conf"
        file.touch(mode=0o600)  # the address of an index may have a password in it
        options = "".join(f"{name} = {value}\n" for name, value in pip_options().items())
        file.write_text(f"[global]\n{options}")
        return file

    def _has(self, name: str) -> bool:
        command = [*self._command, "images", "--quiet", name]
        result = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        return result.returncode == 0 and result.stdout.strip() != ""

    def _ask(self, *arguments: str) -> str:
        command = [*self._command, *arguments]
        result = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
            raise CheckError(f"`buildah {arguments[0]}` failed: {reason}")
        return result.stdout.strip()

    def _run(self, command: list[str], log: Path) -> None:
        """Its output goes into `log`, its progress to the terminal."""
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                if shown := SHOWN.match(line):
                    say(shown[0])
            returncode = process.wait()
        if returncode != 0:
            for line in log.read_text(errors="replace").splitlines()[-12:]:
                print(f"    {line}", file=sys.stderr)
            raise CheckError(f"`{Path(command[0]).name} …` failed; the whole output is in {log}")
