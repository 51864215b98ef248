"""The compose file of deploy/rtx4090: closed to the network, in step with the image and the settings."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import yaml

from s2moe.server.settings import Settings, env_of

from documented import ROOT, commands

sys.path.insert(0, str(ROOT / "deploy"))

import settings_table

README = ROOT / "README.md"
COMPOSE = ROOT / "deploy" / "rtx4090" / "compose.yml"
GUIDE = COMPOSE.with_name("README.md")
HOST_GIB = 6
"""Of memory, which the guide leaves to the host."""


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
    for page in (README, GUIDE):
        mounted = re.findall(r"-v (\S+):/models ", page.read_text())
        assert mounted
        assert set(mounted) == {volume["name"]}, page


def test_the_gpu_is_used_unless_the_user_says_otherwise(server: dict[str, Any]) -> None:
    assert server["environment"]["S2MOE_DEVICE"] == "${S2MOE_DEVICE:-cuda}"
    (flags,) = (line for line in commands(README, "docker run") if "s2moe:4090" in line)
    assert "--device cuda" in flags
    # it would mean slots for experts, even if the model would fit whole
    assert "--memory-budget" not in flags
    assert server["environment"]["S2MOE_MEMORY_BUDGET"] == "${S2MOE_MEMORY_BUDGET:-auto}"


def test_it_is_there_again_after_a_reboot(server: dict[str, Any]) -> None:
    """`on-failure` is not: at shutdown the server ends with 0."""
    assert server["restart"] == "unless-stopped"
    pages = (README, GUIDE, ROOT / "docs/docker.md")
    assert all("unless-stopped" in page.read_text() for page in pages[1:])
    assert not any("on-failure" in page.read_text() for page in pages)


def variables_of_the_file() -> dict[str, str]:
    """What may be set, with the defaults; "" where one must be."""
    return dict(re.findall(r"\$\{(S2MOE_\w+):(?:-([^}]*)|\?[^}]*)\}", COMPOSE.read_text()))


def test_the_guide_lists_the_variables_of_the_file() -> None:
    listed = re.findall(r"^\| `(S2MOE_\w+)` \| (?:`([^`]*)`)? ?\|", GUIDE.read_text(), re.MULTILINE)
    assert dict(listed) == variables_of_the_file()


def test_each_row_of_what_fits_is_settings_to_type() -> None:
    header, _, *rows = settings_table.table_in(GUIDE.read_text(), "rtx4090").splitlines()
    column = header.split(" | ").index("settings")
    assert rows
    for row in rows:
        host, *cells = row.removeprefix("| ").split(" | ")
        settings = dict(setting.split("=") for setting in re.findall(r"`([^`]+)`", cells[column - 1]))
        assert set(settings) == {"S2MOE_MEMORY_LIMIT", "S2MOE_CTX_SIZE"}
        assert set(settings) <= set(variables_of_the_file())
        limit = re.fullmatch(r"(\d+)g", settings["S2MOE_MEMORY_LIMIT"])
        assert limit is not None
        assert int(limit[1]) <= int(host.removesuffix(" GB")) - HOST_GIB
