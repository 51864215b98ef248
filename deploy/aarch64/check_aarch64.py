"""Builds the native libraries for 64-bit ARM on another machine and tries them with qemu-user.

    .venv/bin/python deploy/aarch64/check_aarch64.py [--cpu MARCH] [--test NAME …]

The C++ tests run first. Then an ARM Python, with the packages that the images install, serves the tiny demo
model: it must answer a question as the server does that runs here, and another the same with exact drafts as
without. Needs Debian, root for what is missing of its cross compiler and qemu, and `make setup`; all it makes
lies in build/aarch64.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("native", "deploy", "tests")]

from build import build, exit_status  # noqa: E402
from debian import PackageError, install_missing, run_apt  # noqa: E402
from prepare import PrepareError, say  # noqa: E402

from s2moe.bench.answer import Answer  # noqa: E402
from s2moe.bench.serving import Serving, ServingError  # noqa: E402

from gguf_factory import write_random_model  # noqa: E402

FOLDER = ROOT / "build" / "aarch64"
BUILD = FOLDER / "native"
ARM_ROOT = FOLDER / "root"
PYTHON_PACKAGES = FOLDER / "packages"
TOOLCHAIN = Path(__file__).with_name("toolchain.cmake")
REQUIREMENTS = ROOT / "deploy" / "images" / "requirements.txt"
EMULATOR = "qemu-aarch64-static"
PROGRAMS = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    EMULATOR: "qemu-user-static",
    "dpkg-deb": "dpkg",
}
ARM_PACKAGES = (
    "python3-minimal",
    "libpython3-stdlib",
    "libstdc++6",
    "libgomp1",
    "liburing-dev",
    "ca-certificates",
)
"""Of Debian: with what they depend on, they are the root of the ARM programs."""
DOCKERFILE = ROOT / "Dockerfile.orin"
WHEEL_PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_17_aarch64", "manylinux_2_28_aarch64")
QUESTION = "What is the capital of France?"
"""Every token of the answer is far ahead of the next best one: rounding, which differs, changes nothing."""
STORY = "Write a short story about a fox."
N_TOKENS = 24
TEST_SECONDS = 900


class CheckError(Exception):
    """ARM code does not do what it should."""


# ── an ARM Debian's libraries and Python ────────────────────────────────────────────────────────────────────


def make_root() -> None:
    """Unpacks ARM_PACKAGES and what they need, unless that was done. Raises PackageError."""
    if (ARM_ROOT / "usr/bin/python3").exists():
        return
    say("fetching an ARM Debian's Python and libraries")
    work = FOLDER / "apt"
    shutil.rmtree(work, ignore_errors=True)
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    # an apt of its own, which knows of no installed package: this machine's is left alone
    settings = ["APT::Architecture=arm64", "APT::Architectures=arm64", "Debug::NoLocking=1"]
    settings += [f"Dir::State={work}/state", f"Dir::Cache={work}/cache", f"Dir::State::status={os.devnull}"]
    options = tuple(part for setting in settings for part in ("-o", setting))
    run_apt(["update"], options)
    run_apt(["install", "--download-only", "-y", "--no-install-recommends", *ARM_PACKAGES], options)
    partial = FOLDER / "root.partial"
    shutil.rmtree(partial, ignore_errors=True)
    for archive in sorted((work / "cache/archives").glob("*.deb")):
        name = archive.name.partition("_")[0]
        if not name.endswith("-dev") or name in ARM_PACKAGES:  # the cross compiler has its own libc6-dev
            subprocess.run(["dpkg-deb", "-x", str(archive), str(partial)], check=True)
    shutil.rmtree(ARM_ROOT, ignore_errors=True)
    partial.replace(ARM_ROOT)
    shutil.rmtree(work)


def install_packages() -> None:
    """What the images install, in the wheels for ARM, and s2moe itself. Raises PackageError."""
    stamp = PYTHON_PACKAGES / "requirements.txt"
    if not stamp.exists() or stamp.read_bytes() != REQUIREMENTS.read_bytes():
        say("installing the images' Python packages for ARM")
        shutil.rmtree(PYTHON_PACKAGES, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        wanted = ["--require-hashes", "-r", str(REQUIREMENTS), "--target", str(PYTHON_PACKAGES)]
        wheels = [
            "--only-binary",
            ":all:",
            "--implementation",
            "cp",
            "--python-version",
            arm_python_version(),
        ]
        wheels += [flag for platform in WHEEL_PLATFORMS for flag in ("--platform", platform)]
        command = [*pip, *wanted, *wheels]
        if subprocess.run(command, check=False).returncode != 0:
            raise PackageError(
                "pip failed (its reason is above); check the network and run the same command again"
            )
        shutil.copy(REQUIREMENTS, stamp)
    # these two are Python alone
    site = Path(sysconfig.get_path("purelib"))
    for found in (
        site / "llama_cpp",
        *site.glob("llama_cpp_python-*.dist-info"),
        *site.glob("s2moe-*.dist-info"),
    ):
        link(PYTHON_PACKAGES / found.name, found)
    (PYTHON_PACKAGES / "s2moe").mkdir(exist_ok=True)
    for package in ("server", "engine", "bench"):
        link(PYTHON_PACKAGES / "s2moe" / package, ROOT / package)


def link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def arm_python_version() -> str:
    return (ARM_ROOT / "usr/bin/python3").readlink().name.removeprefix("python")


def write_python() -> Path:
    """A script that is the ARM Python, and starts as such: this machine's kernel cannot run ARM programs."""
    script = FOLDER / "python3"
    python = ARM_ROOT / "usr/bin" / f"python{arm_python_version()}"
    script.write_text(
        "#!/bin/sh\n"
        f"export PYTHONHOME='{ARM_ROOT}/usr' PYTHONPATH='{PYTHON_PACKAGES}' PYTHONDONTWRITEBYTECODE=1\n"
        f"export S2MOE_LIB_DIR='{BUILD}/bin'\n"
        f"exec {EMULATOR} -L '{ARM_ROOT}' -0 '{script}' '{python}' \"$@\"\n"
    )
    script.chmod(0o755)
    return script


# ── the checks ──────────────────────────────────────────────────────────────────────────────────────────────


def run_native_tests(names: Sequence[str]) -> None:
    """Raises CheckError."""
    model = FOLDER / "random.gguf"
    write_random_model(model, "qwen3moe")
    command = ["ctest", "--test-dir", str(BUILD), "--output-on-failure", "--no-tests=error"]
    command += ["--timeout", str(TEST_SECONDS)]
    command += ["-R", f"^({'|'.join(names)})$"] if names else []
    if (
        subprocess.run(command, env={**os.environ, "S2MOE_TEST_MODEL": str(model)}, check=False).returncode
        != 0
    ):
        raise CheckError("C++ tests fail on ARM (see above)")


def make_demo_model() -> Path:
    command = [str(Path(sys.executable).with_name("s2moe")), "demo-model", "--tiny"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise CheckError("the demo model cannot be built (see above)")
    return Path(result.stdout.strip().splitlines()[-1])


@contextmanager
def serving(model: Path, name: str, program: Sequence[str] | None = None) -> Iterator[Serving]:
    work = FOLDER / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    server = Serving(model, work, cache_directory=work / "cache", program=program)
    try:
        yield server
    finally:
        server.close()


def ask(server: Serving, text: str, **options: object) -> Answer:
    return server.chat([{"role": "user", "content": text}], N_TOKENS, options)


def compare_answers(model: Path, python: Path) -> None:
    """Raises CheckError, or ServingError."""
    with serving(model, "here") as here:
        expected = ask(here, QUESTION, speculation="off")
    with serving(model, "arm", (str(python), "-m", "s2moe.server")) as arm:
        say(f"the ARM server is ready after {arm.start_seconds:.0f} s")
        answer, plain = (ask(arm, text, speculation="off") for text in (QUESTION, STORY))
        drafted = ask(arm, STORY, speculation="s2moe", exact=True)
    say(f"{QUESTION} {answer.text.strip()!r}")
    if answer.text != expected.text:
        raise CheckError(f"this machine's server answers {expected.text.strip()!r}")
    say(f"{STORY} {plain.text.strip()!r} ({plain.tokens_per_second:.1f} tokens/s)")
    if drafted.text != plain.text:
        raise CheckError(f"with exact drafts the answer is {drafted.text.strip()!r}")
    n_accepted = (drafted.speculation or {}).get("accepted", 0)
    if n_accepted == 0:
        raise CheckError("no draft was accepted")
    say(f"the same with exact drafts, of which {n_accepted} were accepted")


def orin_cpu() -> str:
    """What the image for the Orin is compiled for."""
    (line,) = (line for line in DOCKERFILE.read_text().splitlines() if line.startswith("ARG CPU="))
    return line.removeprefix("ARG CPU=")


def check(cpu: str, tests: Sequence[str]) -> None:
    started = time.monotonic()
    FOLDER.mkdir(parents=True, exist_ok=True)
    install_missing(PROGRAMS, say)
    make_root()
    install_packages()
    defines = {"CMAKE_TOOLCHAIN_FILE": str(TOOLCHAIN), "S2MOE_ARM_ROOT": str(ARM_ROOT)}
    build("s2moe", {**defines, "S2MOE_NATIVE": "OFF", "GGML_CPU_ARM_ARCH": cpu}, BUILD)
    run_native_tests(tests)
    compare_answers(make_demo_model(), write_python())
    say(f"ARM ({cpu}): all is well ({time.monotonic() - started:.0f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cpu", default=orin_cpu(), metavar="MARCH", help="GCC's -march (default: %(default)s)"
    )
    parser.add_argument(
        "--test", action="append", default=[], metavar="NAME", help="only this C++ test; repeatable"
    )
    arguments = parser.parse_args()
    errors = (CheckError, PackageError, PrepareError, ServingError, OSError)
    return exit_status(lambda: check(arguments.cpu, arguments.test), errors)


if __name__ == "__main__":
    sys.exit(main())
