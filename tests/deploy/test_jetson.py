"""What deploy/jetson installs: units that systemd accepts, and settings that the server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from s2moe.server.settings import Settings, env_of

JETSON = Path(__file__).resolve().parents[2] / "deploy" / "jetson"
MOST_EXPOSED = 2.0
"""Of systemd's 10, what the unit may have; 1.1 to 4.2 is "OK" there."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="there is no systemd-analyze; on Debian: apt-get install systemd",
)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with their drop-in, and with programs that exist here."""
    program = shutil.which("true")
    for path in JETSON.glob("*.service"):
        text = re.sub(r"/opt/s2moe/\.venv/bin/s2moe|/usr/bin/jetson_clocks", str(program), path.read_text())
        (tmp_path / path.name).write_text(text)
    drop_ins = tmp_path / "s2moe.service.d"
    drop_ins.mkdir()
    shutil.copy(JETSON / "gpu.conf", drop_ins)
    return tmp_path


@needs_systemd
@pytest.mark.parametrize("unit", ["s2moe.service", "s2moe-clocks.service"])
def test_systemd_accepts(unit: str, units: Path) -> None:
    result = analyze("verify", "--man=no", str(units / unit))
    complaints = [line for line in result.stderr.splitlines() if unit in line or "gpu.conf" in line]
    assert complaints == []


@needs_systemd
def test_a_misspelt_line_would_be_noticed(units: Path) -> None:
    unit = units / "s2moe.service"
    unit.write_text(unit.read_text().replace("NoNewPrivileges", "NoNewPrivilege"))
    assert "NoNewPrivilege" in analyze("verify", "--man=no", str(unit)).stderr


@needs_systemd
def test_little_of_the_system_is_exposed(units: Path) -> None:
    shutil.rmtree(units / "s2moe.service.d")
    result = analyze("security", "--offline=true", "--no-pager", str(units / "s2moe.service"))
    if "unrecognized option" in result.stderr:
        pytest.skip("this systemd-analyze is older than 250 and cannot judge a file")
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", result.stdout)
    assert exposure is not None, result.stderr
    assert float(exposure[1]) < MOST_EXPOSED, result.stdout


CLOSE_DEVICES = ("PrivateDevices", "ProtectClock", "DevicePolicy", "DeviceAllow")
"""Settings under which a service opens few or no device nodes; ProtectClock in systemd before 252."""


def service_settings(*files: Path) -> dict[str, str]:
    """As systemd merges them: of settings that have one value the last counts."""
    text = "\n".join(file.read_text() for file in files)
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def test_the_drop_in_lets_the_gpu_s_device_nodes_be_opened() -> None:
    unit = JETSON / "s2moe.service"
    alone, merged = service_settings(unit), service_settings(unit, JETSON / "gpu.conf")
    assert alone["PrivateDevices"] == alone["ProtectClock"] == "yes"
    assert {merged.get(name, "no") for name in CLOSE_DEVICES} == {"no"}
    assert merged["NoNewPrivileges"] == "yes"  # nothing else is opened
    assert {name for name in alone if merged[name] != alone[name]} == {"PrivateDevices", "ProtectClock"}


@needs_systemd
def test_systemd_merges_the_drop_in_so(units: Path) -> None:
    protections = {"PrivateDevices", "ProtectClock", "NoNewPrivileges"}
    assert kept_protections(units) & protections == {"NoNewPrivileges"}
    drop_in = units / "s2moe.service.d" / "gpu.conf"
    drop_in.write_text(drop_in.read_text().replace("ProtectClock=no", ""))
    assert kept_protections(units) & protections == {"NoNewPrivileges", "ProtectClock"}


def kept_protections(units: Path) -> set[str]:
    """The settings by which systemd finds the service protected."""
    arguments = ("security", "--offline=true", "--json=short", "--no-pager", str(units / "s2moe.service"))
    result = analyze(*arguments)
    if not result.stdout.startswith("["):
        pytest.skip("this systemd-analyze is older than 250 and cannot judge a file")
    return {finding["json_field"] for finding in json.loads(result.stdout) if finding["set"]}


def test_settings_are_the_server_s() -> None:
    names = re.findall(r"^#?(S2MOE_\w+)=", (JETSON / "s2moe.env").read_text(), re.MULTILINE)
    assert {"S2MOE_MODEL", "S2MOE_MEMORY_BUDGET", "S2MOE_API_KEY_FILE"} <= set(names)
    assert set(names) <= {env_of(name) for name in Settings.model_fields}


def position(text: str) -> int:
    """Of a command in the guide, where there is one only."""
    guide = (JETSON / "README.md").read_text()
    assert guide.count(f"\n    {text}") == 1, text
    return guide.index(f"\n    {text}")


def test_the_model_is_there_before_the_service_starts() -> None:
    env = (JETSON / "s2moe.env").read_text()
    (model,) = re.findall(r"^S2MOE_MODEL=(\S+)$", env, re.MULTILINE)
    folder = Path(model).parent
    made = position("sudo install -d -o s2moe -g s2moe /var/lib/s2moe")
    copied = position(f"sudo install -m 644 model.gguf {folder}/")
    pulled = position("sudo -H -u s2moe .venv/bin/s2moe pull ")
    assert made < copied < pulled < position("sudo systemctl enable --now s2moe\n")
    assert f"--dir {folder}\n" in (JETSON / "README.md").read_text()[pulled:]


def test_the_gpu_is_chosen_before_the_service_starts_anew(tmp_path: Path) -> None:
    changed = position("sudo sed -i ")
    assert position("sudo install -D -m 644 deploy/jetson/gpu.conf") < changed
    restart = (JETSON / "README.md").read_text()[changed:]
    assert re.match(r"\n.*\n    sudo systemctl daemon-reload\n    sudo systemctl restart s2moe\n", restart)

    settings = tmp_path / "s2moe.env"
    shutil.copy(JETSON / "s2moe.env", settings)
    command = restart.splitlines()[1].strip().removeprefix("sudo ")
    command = command.replace("/etc/s2moe/s2moe.env", str(settings))
    subprocess.run(["bash", "-c", command], check=True)
    before, after = (path.read_text().splitlines() for path in (JETSON / "s2moe.env", settings))
    assert [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]] == [
        ("S2MOE_DEVICE=cpu", "S2MOE_DEVICE=cuda")
    ]


def test_the_guide_installs_every_file() -> None:
    guide = (JETSON / "README.md").read_text()
    files = [path.name for path in JETSON.iterdir() if path.name != "README.md"]
    assert [name for name in files if f"deploy/jetson/{name}" not in guide] == []
