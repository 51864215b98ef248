"""Fetching, verifying and patching the llama.cpp source: what a newcomer sees when it goes wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"


@pytest.fixture
def native_copy(tmp_path: Path) -> Path:
    """The scripts, lock file and patches, to be damaged."""
    copy = tmp_path / "native"
    copy.mkdir()
    for name in ("prepare.py", "build.py", "llama_cpp.lock"):
        shutil.copy(NATIVE / name, copy)
    shutil.copytree(NATIVE / "patches", copy / "patches")
    return copy


def run_prepare(native: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(native / "prepare.py"), *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_second_run_does_nothing(native_copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "source"
    first = run_prepare(native_copy, "--out", str(out))
    assert first.returncode == 0, first.stderr
    assert "llama_moe_params moe;" in (out / "src" / "llama-cparams.h").read_text()
    second = run_prepare(native_copy, "--out", str(out))
    assert second.returncode == 0
    assert second.stderr == ""
    assert [path.name for path in tmp_path.glob("source*")] == ["source"]


def test_changed_patch_rewrites_only_what_it_touches(native_copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "source"
    assert run_prepare(native_copy, "--out", str(out)).returncode == 0
    untouched, touched = out / "src" / "llama-vocab.cpp", out / "src" / "llama-cparams.h"
    before = untouched.stat().st_mtime_ns
    patch = native_copy / "patches" / "0001-moe-controls.patch"
    patch.write_text(
        patch.read_text().replace("+    llama_moe_params moe;", "+    llama_moe_params moe; // once more")
    )
    assert run_prepare(native_copy, "--out", str(out)).returncode == 0
    assert "// once more" in touched.read_text()
    assert untouched.stat().st_mtime_ns == before


def test_offline_names_the_remedy(native_copy: Path, tmp_path: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    result = run_prepare(
        native_copy, "--out", str(tmp_path / "source"), S2MOE_CACHE_DIR=str(tmp_path / "empty"), **offline
    )
    line = last_line(result)
    assert "cannot download llama-cpp-python 0.3.36" in line
    assert "Check the network" in line
    assert not (tmp_path / "source").exists()


def test_wrong_hash_is_refused(native_copy: Path, tmp_path: Path) -> None:
    lock = native_copy / "llama_cpp.lock"
    lock.write_text(lock.read_text().replace("sha256:832db069", "sha256:00000000"))
    result = run_prepare(native_copy, "--archive", S2MOE_CACHE_DIR=str(tmp_path / "cache"))
    assert "cannot download" in last_line(result)
    assert not list((tmp_path / "cache").rglob("*.gz"))


def test_damaged_cache_is_not_used(native_copy: Path, tmp_path: Path) -> None:
    archive = tmp_path / "cache" / "downloads" / "llama_cpp_python-0.3.36.tar.gz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"half a download")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    result = run_prepare(native_copy, "--archive", S2MOE_CACHE_DIR=str(tmp_path / "cache"), **offline)
    assert "is damaged" in result.stderr
    assert "cannot download" in last_line(result)


def test_patch_that_does_not_apply_is_named(native_copy: Path, tmp_path: Path) -> None:
    patch = native_copy / "patches" / "0001-moe-controls.patch"
    patch.write_text(
        patch.read_text().replace("-    const uint32_t n_expert_used_il", "-    const int n_expert_used_il")
    )
    line = last_line(run_prepare(native_copy, "--out", str(tmp_path / "source")))
    assert "0001-moe-controls.patch does not apply" in line
    assert not (tmp_path / "source").exists()


def test_missing_tools_are_named(native_copy: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(native_copy / "build.py"), "--folder", str(tmp_path / "build")]
    result = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert "missing cmake, git, gcc, g++" in last_line(result)
