"""Who waits how long for the server's end: never less than the server may take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from s2moe.server import serve
from s2moe.server.settings import Settings

from documented import PAGES, ROOT, commands

DOCKERFILES = ("Dockerfile.orin", "Dockerfile.4090")
UNIT = ROOT / "deploy/jetson/s2moe.service"
COMPOSE = ROOT / "deploy/rtx4090/compose.yml"
DOCKER_STOP_SECONDS = 10
"""What `docker stop` waits for unless it is told otherwise."""
SERVING = [
    (page, line)
    for page in PAGES
    for line in commands(page, "docker run")
    if "--entrypoint" not in line and ("s2moe:" in line or "--stop-timeout" in line)
]


def seconds_to_end(shutdown_timeout: float, *, saves: bool) -> float:
    """What the server takes at most, and with `saves` that with --prompt-cache-dir."""
    engine = serve._ENGINE_SAVE_SECONDS if saves else serve._ENGINE_STOP_SECONDS
    return shutdown_timeout + serve._CUT_SECONDS + serve._ANSWER_FLUSH_SECONDS + engine


def shutdown_timeout_of_the_images() -> float:
    texts = [(ROOT / name).read_text() for name in DOCKERFILES]
    (timeout,) = {value for text in texts for value in re.findall(r"S2MOE_SHUTDOWN_TIMEOUT=(\d+)", text)}
    return float(timeout)


def test_docker_s_own_patience_is_more_than_what_a_running_answer_gets() -> None:
    assert shutdown_timeout_of_the_images() < DOCKER_STOP_SECONDS


@pytest.mark.parametrize(("page", "line"), SERVING, ids=lambda value: getattr(value, "name", ""))
def test_docker_run_leaves_the_server_its_time(page: Path, line: str) -> None:
    found = re.search(r"--stop-timeout (\d+)", line)
    assert found is not None, f"{page.name}: {line}"
    given = re.search(r"-e S2MOE_SHUTDOWN_TIMEOUT=(\d+)", line)
    timeout = float(given[1]) if given else shutdown_timeout_of_the_images()
    saves = "--prompt-cache-dir" in line
    assert float(found[1]) > seconds_to_end(timeout, saves=saves)


def test_the_pages_serve_from_containers() -> None:
    assert {page.name for page, _ in SERVING} >= {"README.md", "docker.md"}


def test_what_saving_conversations_needs_more_is_said() -> None:
    text = " ".join((ROOT / "docs/docker.md").read_text().split())
    more = re.search(r"`--prompt-cache-dir` allow (\d+) seconds more", text)
    assert more is not None
    needed = seconds_to_end(0, saves=True) - seconds_to_end(0, saves=False)
    assert float(more[1]) >= needed
    hanging = re.search(r"Ending it, .* takes a moment, and (\d+) seconds if something hangs", text)
    assert hanging is not None
    assert float(hanging[1]) == seconds_to_end(0, saves=False)


def test_compose_leaves_the_server_its_time() -> None:
    server = yaml.safe_load(COMPOSE.read_text())["services"]["server"]
    grace = re.fullmatch(r"(\d+)s", server["stop_grace_period"])
    assert grace is not None
    assert "S2MOE_SHUTDOWN_TIMEOUT" not in server["environment"]
    assert "S2MOE_PROMPT_CACHE_DIR" not in server["environment"]
    assert float(grace[1]) > seconds_to_end(shutdown_timeout_of_the_images(), saves=False)


def test_systemd_leaves_the_server_its_time() -> None:
    patience = re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert patience is not None
    assert "S2MOE_SHUTDOWN_TIMEOUT" not in UNIT.with_name("s2moe.env").read_text()
    timeout = Settings.model_fields["shutdown_timeout"].default
    assert float(patience[1]) > seconds_to_end(timeout, saves=True)
