"""Stands for `docker` where guides are tried: `run` sees what a container would see of its mounts, `compose`
its variables.

Everything lies below $FAKE_DOCKER: `calls`, one a line, and `volumes/NAME`. What it does not know is an
error, as a misspelt option is for Docker.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(os.environ["FAKE_DOCKER"])
SWITCHES = {"--rm", "-d"}
OPTIONS = {
    "--entrypoint", "--gpus", "--group-add", "--name", "--restart", "--runtime", "--stop-timeout",
    "--user", "-e", "-p", "-v",
}  # fmt: skip
BUILD_OPTIONS = {"--build-arg", "-f", "-t"}
SUBCOMMANDS = {"build", "config", "down", "logs", "ps", "stop", "up"}


def main(arguments: list[str]) -> int:
    with (FOLDER / "calls").open("a") as calls:
        calls.write(shlex.join(arguments) + "\n")
    match arguments:
        case ["compose", "-f", file, subcommand, *_] if subcommand in SUBCOMMANDS:
            return compose(Path(file))
        case ["run", *rest]:
            return run(rest)
        case ["build", *rest]:
            return build(rest)
        case ["stop", name]:
            known = f" --name {name} " in (FOLDER / "calls").read_text()
            return 0 if known else fail(f"no such container: {name}")
    return fail(f"not a command of docker: {shlex.join(arguments)}")


def compose(file: Path) -> int:
    """Fails where a variable that the file requires is neither in the environment nor in .env beside it."""
    env_file = file.with_name(".env")
    lines = env_file.read_text().splitlines() if env_file.exists() else []
    variables = {**dict(line.split("=", 1) for line in lines if line), **os.environ}
    for name in re.findall(r"\$\{(\w+):\?", file.read_text()):
        if not variables.get(name):
            return fail(f"required variable {name} is missing a value")
    if not Path(variables["S2MOE_API_KEY_FILE"]).is_file():
        return fail("the secret has no file")
    return 0


class UnknownOptionError(Exception):
    pass


def parse(arguments: list[str], known: set[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of each option, and what follows them. Raises UnknownOptionError."""
    values: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("-"):
        option, *arguments = arguments
        if option in known:
            values.setdefault(option, []).append(arguments.pop(0))
        elif option in SWITCHES:
            values[option] = []
        else:
            raise UnknownOptionError(f"unknown option {option}")
    return values, arguments


def build(arguments: list[str]) -> int:
    """Fails where an argument is none of the Dockerfile's, which Docker only warns of."""
    values, folders = parse(arguments, BUILD_OPTIONS)
    if folders != ["."] or "-t" not in values:
        return fail("build: which folder, which tag?")
    (file,) = values["-f"]
    declared = re.findall(r"^ARG (\w+)", Path(file).read_text(), re.MULTILINE)
    for name, _, value in (argument.partition("=") for argument in values.get("--build-arg", [])):
        if name not in declared or not value:
            return fail(f"{file} has no argument {name}, or it got no value")
    return 0


def run(arguments: list[str]) -> int:
    values, [_, *command] = parse(arguments, OPTIONS)
    if "--rm" in values and "--restart" in values:
        return fail("conflicting options: cannot specify both --restart and --rm")
    for source in (mount.split(":")[0] for mount in values.get("-v", [])):
        if source.startswith("/") and not Path(source).exists():
            return fail(f"nothing to mount at {source}")
    if values.get("--entrypoint") != ["install"]:
        return 0
    with tempfile.TemporaryDirectory(dir=FOLDER) as root:
        for mount in values["-v"]:
            source, target = mount.split(":")[:2]
            inside = Path(root, target.lstrip("/"))
            inside.parent.mkdir(parents=True, exist_ok=True)
            if not source.startswith("/"):
                (FOLDER / "volumes" / source).mkdir(parents=True, exist_ok=True)
                inside.symlink_to(FOLDER / "volumes" / source)
            elif Path(source).is_dir():  # what its links point to is not mounted
                shutil.copytree(source, inside, symlinks=True)
            else:
                shutil.copy(source, inside)
        inside_paths = [f"{root}{word}" if word.startswith("/") else word for word in command]
        return subprocess.run(["install", *inside_paths], check=False).returncode


def fail(reason: str) -> int:
    print(f"fake docker: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UnknownOptionError as error:
        sys.exit(fail(str(error)))
