"""Fetches the pinned llama.cpp source, verifies it, unpacks it and applies our patches.

    python3 native/prepare.py --out DIR [--unpatched]

Standard library only: it runs before anything is installed. A second run with the same lock file and
patches does nothing. DIR/.s2moe-source then names what lies there: the release, llama.cpp's commit, and
the first digits of the patches' hash.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

NATIVE_DIR = Path(__file__).resolve().parent
LOCK_FILE = NATIVE_DIR / "llama_cpp.lock"
PATCH_DIR = NATIVE_DIR / "patches"
STAMP_NAME = ".s2moe-source"
VENDORED = "vendor/llama.cpp"
UNPACKED_FOLDERS = ("cmake", "common", "ggml", "include", "licenses", "src", "vendor", "models/templates")


class PrepareError(Exception):
    """One line for the person at the terminal: what went wrong and what to do."""


def say(text: str) -> None:
    print(f"native: {text}", file=sys.stderr, flush=True)


def cache_dir() -> Path:
    """Where downloads are kept between builds and clones."""
    if explicit := os.environ.get("S2MOE_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "s2moe"


class Lock(NamedTuple):
    package: str
    version: str
    sha256: str
    commit: str


def read_lock() -> Lock:
    text = LOCK_FILE.read_text()
    pin = re.search(r"^([\w.-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    commit = re.search(r"^# llama\.cpp commit ([0-9a-f]{40})$", text, re.MULTILINE)
    if pin is None or commit is None:
        raise PrepareError(f"{LOCK_FILE} lacks its pin or llama.cpp's commit; restore it from git")
    return Lock(pin[1], pin[2], pin[3], commit[1])


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_release() -> Path:
    """Returns the verified source archive, downloading it unless the cache has it."""
    package, version, sha256, _ = read_lock()
    folder = cache_dir() / "downloads"
    archive = folder / f"{package.replace('-', '_')}-{version}.tar.gz"
    if archive.exists():
        if sha256_of(archive) == sha256:
            return archive
        say(f"{archive} is damaged, downloading it again")
        archive.unlink()
    say(f"downloading {package} {version} (73 MiB source release) with pip")
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / f"partial-{os.getpid()}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    # the hash binds the archive; --no-binary keeps pip from choosing a wheel
    command += ["--no-binary", package, "--dest", str(work), "--requirement", str(LOCK_FILE)]
    try:
        # pip's own progress goes to the terminal, its errors into our one line
        result = subprocess.run(command, check=False, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        found = work / archive.name
        if result.returncode != 0 or not found.exists():
            errors = [line for line in result.stderr.splitlines() if "ERROR" in line or "No module" in line]
            reason = errors[-1] if errors else "no file arrived"
            raise PrepareError(
                f"cannot download {package} {version}: {reason}. Check the network and pip's "
                f"index settings, or put the archive at {archive}"
            )
        if sha256_of(found) != sha256:
            raise PrepareError(f"the downloaded {archive.name} does not have the sha256 of {LOCK_FILE}")
        found.replace(archive)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return archive


def source_stamp(*, patched: bool) -> str:
    lock = read_lock()
    if not patched:
        return f"{lock.version}-{lock.commit[:9]}"
    digest = hashlib.sha256()
    for patch in sorted(PATCH_DIR.glob("*.patch")):
        digest.update(patch.read_bytes())
    return f"{lock.version}-{lock.commit[:9]}-p{digest.hexdigest()[:8]}"


def unpack(archive: Path, out: Path) -> None:
    say(f"unpacking llama.cpp into {out}")
    with tarfile.open(archive) as tar:
        if hasattr(
            tarfile, "data_filter"
        ):  # Debian 12's python has none yet; the hash vouches for the archive
            tar.extraction_filter = tarfile.data_filter
        for member in tar:
            name = member.name.partition("/")[2]
            if not name.startswith(f"{VENDORED}/"):
                continue
            name = name.removeprefix(f"{VENDORED}/")
            wanted = "/" not in name or name.startswith(tuple(f"{folder}/" for folder in UNPACKED_FOLDERS))
            # `.git` there points to a repository that is not part of the release
            if wanted and name != ".git" and (member.isfile() or member.isdir()):
                member.name = name
                tar.extract(member, out)


def apply_patches(out: Path) -> None:
    # the ceiling keeps git from taking `out` for a part of the repository around it
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(out.parent)}
    for patch in sorted(PATCH_DIR.glob("*.patch")):
        say(f"applying {patch.name}")
        command = ["git", "apply", "--unidiff-zero", "--whitespace=nowarn", str(patch)]
        result = subprocess.run(
            command, cwd=out, env=environment, check=False, capture_output=True, text=True
        )
        if result.returncode != 0:
            raise PrepareError(
                f"{patch.name} does not apply to the pinned source: {result.stderr.strip().splitlines()[0]}"
            )


def prepare(out: Path, *, patched: bool) -> None:
    """Leaves the source in `out`, or raises PrepareError and leaves nothing that looks complete."""
    stamp = source_stamp(patched=patched)
    stamp_file = out / STAMP_NAME
    if stamp_file.exists() and stamp_file.read_text().strip() == stamp:
        return
    archive = fetch_release()
    fresh = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        unpack(archive, fresh)
        if patched:
            apply_patches(fresh)
        (fresh / STAMP_NAME).write_text(f"{stamp}\n")
        if out.exists():
            # unchanged files keep their old time stamps, so that a new patch rebuilds only what it touches
            for path in fresh.rglob("*"):
                old = out / path.relative_to(fresh)
                if path.is_file() and old.is_file() and old.read_bytes() == path.read_bytes():
                    shutil.copystat(old, path)
            shutil.rmtree(out)
        fresh.replace(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/llama.cpp"), help="where the source tree goes"
    )
    parser.add_argument("--unpatched", action="store_true", help="leave llama.cpp as released")
    parser.add_argument("--archive", action="store_true", help="only print the path of the verified archive")
    arguments = parser.parse_args()
    try:
        if arguments.archive:
            print(fetch_release())
        else:
            prepare(arguments.out.resolve(), patched=not arguments.unpatched)
    except (PrepareError, OSError, tarfile.TarError) as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
