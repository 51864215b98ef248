"""With no hook set, the patched library computes bit for bit what the unpatched one does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from s2moe.engine.native import library_dir

from gguf_factory import ARCHITECTURES

EVALUATE = Path(__file__).with_name("evaluate.py")


def logits_of(library: Path, model: Path, out: Path) -> bytes:
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(library)}
    subprocess.run([sys.executable, str(EVALUATE), str(model), str(out)], env=environment, check=True)
    rows = np.load(out)
    assert np.isfinite(rows).all()
    assert rows.std() > 0
    return rows.tobytes()


@pytest.mark.timeout(1800)  # the first use builds the stock library
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_models(
    name: str, random_model: Callable[[str], Path], stock_library_dir: Path, tmp_path: Path
) -> None:
    model = random_model(name)
    ours = logits_of(library_dir(), model, tmp_path / "ours.npy")
    assert ours == logits_of(stock_library_dir, model, tmp_path / "stock.npy")


@pytest.mark.timeout(1800)
def test_demo_model(tiny_model_path: Path, stock_library_dir: Path, tmp_path: Path) -> None:
    ours = logits_of(library_dir(), tiny_model_path, tmp_path / "ours.npy")
    assert ours == logits_of(stock_library_dir, tiny_model_path, tmp_path / "stock.npy")


def test_the_comparison_is_between_two_libraries(stock_library_dir: Path) -> None:
    symbols = [
        b"llama_moe_set_record" in (folder / "libllama.so").read_bytes()
        for folder in (library_dir(), stock_library_dir)
    ]
    assert symbols == [True, False]
