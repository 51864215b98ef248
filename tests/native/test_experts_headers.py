"""Impossible numbers in a header whose tensors are all in place are refused, and nothing aborts on them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from s2moe.engine.native import Library, NativeError, Status
from s2moe.engine.native_experts import Experts, model_layout

from expert_models import EXPERT_MODELS
from gguf_bytes import GgufFile, rewrite
from gguf_factory import ARCHITECTURES, write_random_model

N_EXPERTS = EXPERT_MODELS["q4_0"].n_expert
MAX_EXPERTS = 1024
"""LLAMA_MAX_EXPERTS"""
IMPOSSIBLE = [
    *(("expert_used_count", value) for value in (0, N_EXPERTS + 1, 2**31, 2**32 - 1)),
    *(("block_count", value) for value in (513, 600, 2**31)),
    *(("expert_count", value) for value in (MAX_EXPERTS + 1, 2**31)),
]


@pytest.fixture
def model(expert_model: Callable[[str], Path], tmp_path: Path) -> Path:
    path = tmp_path / "odd.gguf"
    shutil.copy(expert_model("q4_0"), path)
    return path


def inspect(path: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what llama.cpp does not like it may abort for."""
    command = [sys.executable, "-m", "s2moe.server", "inspect", str(path), "--ctx", "64"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def assert_refused(path: Path, *words: str) -> None:
    library = Library()
    for read in (model_layout, Experts):
        with pytest.raises(NativeError) as error:
            read(library, path)
        assert error.value.status == Status.IO
        assert all(word in error.value.message for word in (path.name, *words)), error.value.message
    result = inspect(path)
    assert result.returncode > 0, f"signal {-result.returncode}: {result.stderr}"
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("s2moe: error: ")
    assert path.name in line


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE)
def test_impossible_counts_are_refused(key: str, value: int, model: Path) -> None:
    rewrite(model, lambda file: file.set_uint32(f"qwen3moe.{key}", value))
    assert_refused(model, key, str(value))


@pytest.mark.parametrize("value", [-1, -(2**31)])
@pytest.mark.parametrize("key", ["expert_used_count", "block_count", "expert_count"])
def test_negative_counts_are_refused(key: str, value: int, model: Path) -> None:
    rewrite(model, lambda file: file.set_int32(f"qwen3moe.{key}", value))
    with pytest.raises(NativeError) as error:
        model_layout(Library(), model)
    assert error.value.status == Status.IO
    assert key in error.value.message


def test_more_experts_than_llama_cpp_knows_are_refused(tmp_path: Path) -> None:
    """Tensors and key agree."""
    path = tmp_path / "crowded.gguf"
    variant = replace(
        ARCHITECTURES["qwen3moe"],
        n_layer=1,
        n_expert=MAX_EXPERTS + 8,
        n_expert_used=2,
        n_embd=32,
        n_ff_exp=32,
    )
    write_random_model(path, variant)
    assert_refused(path, "expert_count", str(MAX_EXPERTS + 8))


def test_the_file_is_otherwise_whole(model: Path) -> None:
    """What is refused above is the number; one expert or all of them per token are fine."""
    for n_used in (1, N_EXPERTS):

        def change(file: GgufFile, n_used: int = n_used) -> None:
            file.set_uint32("qwen3moe.expert_used_count", n_used)

        rewrite(model, change)
        assert model_layout(Library(), model)["n_expert_used"] == n_used
    result = inspect(model)
    assert result.returncode == 0, result.stderr
