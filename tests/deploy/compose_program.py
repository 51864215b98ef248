"""Docker Compose, where it is: as a plugin of Docker or as a program of its own. `config` needs no daemon."""

from __future__ import annotations

import shutil
import subprocess

import pytest

LEAST_VERSION = 2
"""The first one knows no `name:`."""


def compose_command() -> tuple[str, ...]:
    """Empty where there is none."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(command[0]) is not None:
            asked = subprocess.run(
                [*command, "version", "--short"], capture_output=True, text=True, check=False
            )
            major = asked.stdout.strip().removeprefix("v").partition(".")[0]
            if asked.returncode == 0 and major.isdigit() and int(major) >= LEAST_VERSION:
                return command
    return ()


COMPOSE = compose_command()
needs_compose = pytest.mark.skipif(
    not COMPOSE,
    reason=f"there is no Docker Compose {LEAST_VERSION} or newer (`docker compose`, docker-compose)",
)
