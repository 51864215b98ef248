"""Debian's packages for the checks of deployment. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping

APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")


class PackageError(Exception):
    """What a check needs is not there and cannot be installed; the message names it."""


def install_missing(packages: Mapping[str, str], say: Callable[[str], None]) -> None:
    """`packages`: the Debian package of each program; `say` tells what is installed. Raises PackageError."""
    missing = sorted({package for program, package in packages.items() if shutil.which(program) is None})
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise PackageError(f"missing {', '.join(missing)}; on Debian: apt-get install {' '.join(missing)}")
    say(f"installing {', '.join(missing)}")
    try:
        for step in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
            run_apt(step)
    except PackageError as error:
        raise PackageError(f"{error}; install {', '.join(missing)}") from error


def run_apt(step: list[str], options: tuple[str, ...] = ()) -> None:
    """Raises PackageError with apt-get's reason."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    result = subprocess.run(
        [*APT, *options, *step], env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise PackageError(f"apt-get {step[0]} failed: {reason}")
