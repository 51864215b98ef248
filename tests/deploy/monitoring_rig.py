"""What deploy/monitoring asks of a server, and Prometheus in front of one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from e2e_rig import ServeProcess
from fake_engine import FakeEngine
from server_rig import chat
from threaded_rig import threaded_server

from ports import free_port
from waiting import PATIENCE_SECONDS, until

__all__ = ["FakeEngine", "ServeProcess", "chat", "threaded_server", "until"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "monitoring"
DASHBOARD = FOLDER / "grafana" / "s2moe.json"
JOB = "s2moe"
OF_PROMETHEUS = frozenset({"up"})
"""Series that Prometheus makes itself for each target."""
_GRAFANA = {"$__rate_interval": "10m", "$instance": ".+"}


@dataclass(frozen=True)
class Question:
    """An expression, and who asks it."""

    asker: str
    expression: str


def tool(name: str) -> str:
    """The path of prometheus or promtool; skips the test where there is none."""
    unpacked = ROOT / "build" / "monitoring" / "usr" / "bin" / name
    path = shutil.which(name) or (str(unpacked) if unpacked.exists() else None)
    if path is None:
        pytest.skip(f"there is no {name}; deploy/monitoring/install-tools unpacks Debian's")
    return path


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in load("alerts.yml")["groups"] for rule in group["rules"]]


def questions_of_rules() -> list[Question]:
    return [Question(rule["alert"], rule["expr"]) for rule in rules()]


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def questions_of_panels() -> list[Question]:
    return [
        Question(f"{panel['title']} {target['refId']}", as_prometheus_sees(target["expr"]))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]


def questions_beside_panels() -> list[Question]:
    """Of annotations and variables."""
    found = [
        Question(each["name"], as_prometheus_sees(each["expr"]))
        for each in dashboard()["annotations"]["list"]
    ]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            series = re.fullmatch(r"label_values\((.+), \w+\)", variable["query"]["query"])
            assert series is not None, variable
            found.append(Question(variable["name"], series[1]))
    return found


def as_prometheus_sees(expression: str) -> str:
    """Without Grafana's variables."""
    for name, value in _GRAFANA.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


class Prometheus:
    """Prometheus with the shipped files and the flags of compose.yml, at one scrape per second. A context
    manager; `key` is the server's, for which the lines about it are put in force."""

    def __init__(self, folder: Path, server: str, *, key: str | None = None) -> None:
        """`server`: host and port."""
        folder.mkdir()
        shutil.copy(FOLDER / "alerts.yml", folder)
        config = (FOLDER / "prometheus.yml").read_text()
        config = config.replace("127.0.0.1:8080", server).replace(": 15s", ": 1s")
        if key is not None:
            config = re.sub(r"# (authorization:\n +)# +(credentials_file: )", r"\1  \2", config)
            (folder / "s2moe.key").write_text(f"{key}\n")
        (folder / "prometheus.yml").write_text(config)
        self._log = folder / "log"
        address = f"127.0.0.1:{free_port()}"
        flags = " ".join(load("compose.yml")["services"]["prometheus"]["command"])
        flags = flags.replace("127.0.0.1:9090", address).replace("path=/prometheus", f"path={folder}/data")
        self._command = [tool("prometheus"), *flags.replace("/etc/prometheus", str(folder)).split()]
        self._http = httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_SECONDS)
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Prometheus:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        until(self._is_ready, "the start of Prometheus")
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(PATIENCE_SECONDS)

    def complaints(self) -> list[str]:
        """Lines of its log that are more than information."""
        lines = self._log.read_text().splitlines()
        return [line for line in lines if re.search(r"level=(warn|error)", line, re.IGNORECASE)]

    def data(self, path: str, **parameters: str) -> Any:
        """Of an answer of its API. Raises AssertionError with its message where it refuses."""
        reply = self._http.get(f"/api/v1/{path}", params=parameters)
        assert reply.status_code == httpx.codes.OK, reply.text
        return reply.json()["data"]

    def target(self) -> dict[str, Any]:
        """The one that it scrapes."""
        (target,) = self._targets()
        return target

    def wait_health(self, health: str) -> dict[str, Any]:
        """Returns the target as it was when scraping it went well (up) or badly (down). Prometheus begins
        after 5 s. What the scrape brought may not be stored yet: wait_scrape()."""
        found: list[dict[str, Any]] = []

        def is_found() -> bool:
            found[:] = [each for each in self._targets() if each["health"] == health]
            return bool(found)

        until(is_found, f"the target's health {health}")
        return found[0]

    def wait_scrape(self) -> None:
        """Until all of a successful scrape is stored that began after this call."""
        began = time.time()
        until(lambda: (self.value("timestamp(up) and up == 1") or 0) > began, "a scrape")

    def wait_values(self, expression: str, asker: str) -> dict[frozenset[tuple[str, str]], float]:
        """values(), once there are some: a rate needs two scrapes, and on a loaded machine one may fail."""
        found: dict[frozenset[tuple[str, str]], float] = {}

        def is_found() -> bool:
            found.update(self.values(expression))
            return bool(found)

        until(is_found, f"an answer for {asker}")
        return found

    def values(self, expression: str) -> dict[frozenset[tuple[str, str]], float]:
        """The present value of each series of an expression, by its labels."""
        result = self.data("query", query=expression)["result"]
        return {frozenset(each["metric"].items()): float(each["value"][1]) for each in result}

    def value(self, expression: str) -> float | None:
        """Of an expression with one series at most; None while there is none."""
        values = self.values(expression)
        assert len(values) <= 1, f"{expression} has {len(values)} series"
        return next(iter(values.values()), None)

    def firing(self) -> dict[str, dict[str, Any]]:
        """Alerts by their names."""
        alerts = self.data("alerts")["alerts"]
        return {each["labels"]["alertname"]: each for each in alerts if each["state"] == "firing"}

    def _targets(self) -> list[dict[str, Any]]:
        return list(self.data("targets", state="active")["activeTargets"])

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return self._http.get("/-/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


def run_promtool(*arguments: str, stdin: str | None = None) -> str:
    """What it prints. Raises AssertionError with that where it finds a fault."""
    command = [tool("promtool"), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
