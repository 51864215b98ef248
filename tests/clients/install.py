"""Installs the clients of versions.toml, each into an environment of its own below build/clients.

    .venv/bin/python tests/clients/install.py [NAME …]

A Python client gets a virtual environment `build/clients/NAME`, the Node clients share `build/clients/node`.
What is installed already in the versions asked for is left alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1] / "build" / "clients"
NODE = "node"
STAMP = "installed.json"


class InstallError(Exception):
    """A client cannot be installed; the message is one line."""


def versions() -> dict[str, Any]:
    return tomllib.loads((HERE / "versions.toml").read_text())


def requirements() -> dict[str, Any]:
    """What each environment has to hold: a list for pip, a table for npm."""
    table = versions()
    return {**table["python"], NODE: table["node"]}


def environment(name: str) -> Path:
    return ROOT / name


def python_of(name: str) -> Path:
    return environment(name) / "bin" / "python"


def is_installed(name: str) -> bool:
    stamp = environment(name) / STAMP
    return stamp.is_file() and json.loads(stamp.read_text()) == requirements()[name]


def install(name: str) -> None:
    """Raises InstallError."""
    wanted = requirements()[name]
    folder = environment(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if name == NODE:
            _install_node(folder, wanted)
        else:
            _install_python(folder, wanted)
    except FileNotFoundError as error:
        raise InstallError(f"{name}: there is no {error.filename}; on Debian: apt-get install npm") from error
    except subprocess.CalledProcessError as error:
        raise InstallError(f"{name}: {error.cmd[0]} failed (its reason is above)") from error
    (folder / STAMP).write_text(json.dumps(wanted))


def _install_python(folder: Path, wanted: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted], check=True)


def _install_node(folder: Path, wanted: dict[str, str]) -> None:
    package = {"private": True, "type": "module", "dependencies": wanted}
    (folder / "package.json").write_text(json.dumps(package, indent=2))
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], cwd=folder, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(requirements())}; none = all"
    )
    names = parser.parse_args().names or list(requirements())
    if unknown := set(names) - set(requirements()):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    for name in names:
        if is_installed(name):
            continue
        print(f"clients: installing {name}", file=sys.stderr)
        try:
            install(name)
        except InstallError as error:
            print(f"clients: error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
