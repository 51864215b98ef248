"""Runs an image without a container engine: its file system as root, its user, environment and entrypoint,
and PID 1 in a PID namespace of its own, as `docker run` would. The network is the machine's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 10
STOP_SECONDS = 30

# $1 is the image's root, $2 what is mounted as its volume, $3 where, $4 ro or rw; the rest is the command
SETUP = """
set -e
root=$1 source=$2 target=$3 mode=$4
shift 4
mount --bind "$root" "$root"
mount -o "remount,bind,$mode" "$root"
[ "$mode" = rw ] || mount -t tmpfs tmpfs "$root/tmp"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
mount --bind "$source" "$root$target"
exec "$@"
"""


class CheckError(Exception):
    """One line for the person at the terminal: what is not as it should be."""


@dataclass(frozen=True)
class ImageConfig:
    """What an image says about how it is run."""

    user: str
    entrypoint: tuple[str, ...]
    environment: Mapping[str, str]
    health_command: tuple[str, ...]
    """Empty where there is none."""
    volumes: tuple[str, ...]
    working_directory: str

    @classmethod
    def from_docker(cls, config: Mapping[str, Any]) -> ImageConfig:
        """`config` as in Docker's image format. Only health checks without a shell are understood."""
        kind, *command = (config.get("Healthcheck") or {}).get("Test") or ("NONE",)
        return cls(
            user=config.get("User") or "0",
            entrypoint=tuple(config.get("Entrypoint") or ()),
            environment=dict(entry.split("=", 1) for entry in config.get("Env") or ()),
            health_command=tuple(command) if kind == "CMD" else (),
            volumes=tuple(config.get("Volumes") or ()),
            working_directory=config.get("WorkingDir") or "/",
        )


class Container:
    """A running command of an image. Its output is in `log`."""

    def __init__(
        self,
        root: Path,
        config: ImageConfig,
        volume: Path,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        log: Path,
        *,
        closed: bool = False,
    ) -> None:
        """`root`: where the image's file system is mounted; `volume`: a folder for its one volume; `closed`:
        as `docker run --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges`."""
        (root / "etc/resolv.conf").touch()
        user = [
            "chroot",
            str(root),
            "setpriv",
            f"--reuid={config.user}",
            f"--regid={group_of(root, config.user)}",
        ]
        user += [f"--groups={','.join(groups_of(root, config.user))}"]
        user += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"] if closed else []
        settings = {**config.environment, "HOME": config.volumes[0], **environment}
        setenv = ["env", "-i", f"--chdir={config.working_directory}"]
        setenv += [f"{name}={value}" for name, value in settings.items()]
        mode = "ro" if closed else "rw"
        setup = ["sh", "-c", SETUP, "sh", str(root), str(volume), config.volumes[0], mode]
        self.log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", *setup, *user, *setenv, *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def pids(self) -> list[int]:
        """All of its processes, PID 1 first, numbered as on the machine."""
        return list(_descendants(self._process.pid))

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> int:
        """The exit code. Raises CheckError when it takes longer."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise CheckError(
                f"a container did not end within {seconds:.0f} seconds; see {self.log}"
            ) from None

    def stop(self) -> int:
        """What `docker stop` does, but with more patience. Returns the exit code."""
        os.kill(self._first_pid(), signal.SIGTERM)
        return self.wait(STOP_SECONDS)

    def kill(self) -> None:
        if not self.has_ended():
            self._process.kill()  # and with it all of the namespace
            self._process.wait()

    def _first_pid(self) -> int:
        deadline = time.monotonic() + START_SECONDS
        while not (pids := self.pids()):
            if time.monotonic() > deadline or self.has_ended():
                raise CheckError(f"a container has no process; see {self.log}")
            time.sleep(0.05)
        return pids[0]


def group_of(root: Path, user: str) -> str:
    """The group id of a numeric user of the image."""
    for _, uid, gid in _passwd(root):
        if uid == user:
            return gid
    raise CheckError(f"the image's user is {user}, who is not in its /etc/passwd")


def groups_of(root: Path, user: str) -> list[str]:
    """All group ids of a numeric user of the image."""
    (name,) = (name for name, uid, _ in _passwd(root) if uid == user)
    lines = [line.split(":") for line in (root / "etc/group").read_text().splitlines()]
    return [group_of(root, user), *(gid for _, _, gid, members in lines if name in members.split(","))]


def _passwd(root: Path) -> Iterator[tuple[str, str, str]]:
    """Name, user id, group id."""
    for line in (root / "etc/passwd").read_text().splitlines():
        name, _, uid, gid, *_ = line.split(":")
        yield name, uid, gid


def _descendants(pid: int) -> Iterator[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return
    for child in map(int, children):
        yield child
        yield from _descendants(child)
