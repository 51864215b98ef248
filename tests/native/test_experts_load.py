"""Loading a model reads its dense weights and not its experts, and only the slots take memory for those."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from expert_models import EXPERT_MODELS
from gguf_bytes import split
from gguf_factory import write_random_model

LOAD = Path(__file__).with_name("load_stored.py")
HEADERS = 1 << 20
"""The headers are read by the store and by llama.cpp, each in steps of its own."""
KV_AND_BUFFERS = 24 << 20
"""What a context of 128 tokens, llama.cpp and Python take, at most."""


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 MiB of experts, 22 times as much as of everything else."""
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    write_random_model(path, replace(EXPERT_MODELS["q8_0"], n_expert=128), weights="Q8_0")
    return path


def load(path: Path) -> dict[str, int]:
    result = subprocess.run(
        [sys.executable, str(LOAD), str(path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    figures: dict[str, int] = json.loads(result.stdout)
    return figures


@pytest.mark.parametrize("n_files", [1, 3])
def test_experts_are_not_read_at_load(large_model: Path, n_files: int) -> None:
    read = load(large_model if n_files == 1 else split(large_model, n_files)[0])
    assert read["expert_bytes"] > 10 * (read["dense_bytes"] + HEADERS)
    assert read["dense_bytes"] <= read["rchar"] <= read["dense_bytes"] + HEADERS
    # the kernel reads ahead of the dense tensors, which lie between those of the experts
    assert read["read_bytes"] <= read["dense_bytes"] + read["expert_bytes"] // 5
    assert 0 < read["first_decode_bytes"] < read["expert_bytes"] // 10


def test_only_slots_take_memory_for_experts(large_model: Path) -> None:
    taken = load(large_model)
    slots = taken["capacity_bytes"] + taken["dense_bytes"]
    assert taken["capacity_bytes"] > 40 << 20
    assert 0.9 * slots < taken["anonymous_bytes"] < slots + KV_AND_BUFFERS
