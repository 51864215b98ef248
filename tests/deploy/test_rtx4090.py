"""The compose file of deploy/rtx4090: closed to the network, in step with the image and the settings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from s2moe.server.settings import Settings, env_of

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
COMPOSE = ROOT / "deploy" / "rtx4090" / "compose.yml"
HAS_COMPOSE = shutil.which("docker") is not None and (
    subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
)


@pytest.fixture(scope="module")
def server() -> dict[str, Any]:
    service: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]["server"]
    return service


def test_only_this_machine_reaches_the_port(server: dict[str, Any]) -> None:
    assert server["ports"] == ["127.0.0.1:${S2MOE_PORT:-8080}:8080"]


def test_a_key_is_required(server: dict[str, Any]) -> None:
    secrets = yaml.safe_load(COMPOSE.read_text())["secrets"]
    (name,) = server["secrets"]
    assert server["environment"]["S2MOE_API_KEY_FILE"] == f"/run/secrets/{name}"
    assert ":?" in secrets[name]["file"]


def test_settings_are_the_server_s(server: dict[str, Any]) -> None:
    names = {name for name in server["environment"] if name.startswith("S2MOE_")}
    assert names <= {env_of(name) for name in Settings.model_fields}
    assert "S2MOE_MODEL" in names


def test_the_health_check_is_the_image_s(server: dict[str, Any]) -> None:
    dockerfile = (ROOT / "Dockerfile.4090").read_text()
    command = re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", dockerfile, re.MULTILINE)
    assert command is not None
    assert server["healthcheck"]["test"] == ["CMD", *json.loads(command[1])]


def test_the_volume_is_the_image_s(server: dict[str, Any]) -> None:
    (volume,) = server["volumes"]
    assert f"VOLUME {volume.partition(':')[2]}\n" in (ROOT / "Dockerfile.4090").read_text()
    assert server["environment"]["S2MOE_MODEL"].startswith(f"{volume.partition(':')[2]}/")


def test_compose_makes_the_volume_that_docker_run_uses_where_it_is_missing(server: dict[str, Any]) -> None:
    """`external` would fail for a newcomer, and without a name of its own it would be `s2moe_models`."""
    source = server["volumes"][0].partition(":")[0]
    volume = yaml.safe_load(COMPOSE.read_text())["volumes"][source]
    assert not volume.get("external")
    for page in (README, COMPOSE.with_name("README.md")):
        mounted = re.findall(r"-v (\S+):/models ", page.read_text())
        assert mounted
        assert set(mounted) == {volume["name"]}, page


def test_the_gpu_is_used_unless_the_user_says_otherwise(server: dict[str, Any]) -> None:
    assert server["environment"]["S2MOE_DEVICE"] == "${S2MOE_DEVICE:-cuda}"
    (flags,) = re.findall(r"^    docker run .* s2moe:4090 (.*)$", README.read_text(), re.MULTILINE)
    assert "--device cuda" in flags
    # it would mean slots for experts, even if the model would fit whole
    assert "--memory-budget" not in flags
    assert server["environment"]["S2MOE_MEMORY_BUDGET"] == "${S2MOE_MEMORY_BUDGET:-auto}"


@pytest.mark.skipif(not HAS_COMPOSE, reason="there is no docker compose")
def test_compose_accepts_the_file() -> None:
    environment = {"S2MOE_MODEL": "model.gguf", "S2MOE_API_KEY_FILE": "/dev/null", "PATH": "/usr/bin:/bin"}
    command = ["docker", "compose", "-f", str(COMPOSE), "config", "--quiet"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
