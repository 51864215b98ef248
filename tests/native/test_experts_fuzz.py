"""No header, however damaged, crashes its reader, hangs it, makes it allocate much, or gets bytes past the
end of the file into a layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gguf_bytes import split
from gguf_factory import ARCHITECTURES, write_random_model

FUZZ = Path(__file__).with_name("fuzz_headers.py")
N_CASES = int(os.environ.get("S2MOE_FUZZ_CASES", "3000"))
"""Headers to try; a million takes about half an hour."""
FIRST_CASE = int(os.environ.get("S2MOE_FUZZ_FIRST", "0"))


def fuzz(file: Path, model: Path) -> dict[str, int]:
    """Outcomes of the mutants of one file of a model."""
    case = file.with_name("case")
    command = [sys.executable, str(FUZZ), str(file), str(case), str(FIRST_CASE), str(N_CASES), str(model)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    description = case.read_text().strip()
    assert result.returncode == 0, f"mutant {description}: exit {result.returncode}\n{result.stderr[-2000:]}"
    outcomes: dict[str, int] = json.loads(result.stdout)
    assert sum(outcomes.values()) == N_CASES
    return outcomes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    variant = replace(ARCHITECTURES["qwen3moe"], n_layer=2, n_expert=8, n_expert_used=2, n_ff_exp=32)
    write_random_model(path, variant)
    return path


@pytest.mark.timeout(60 + N_CASES // 50)
def test_mutated_headers(model: Path) -> None:
    outcomes = fuzz(model, model)
    # not everything is refused before it is looked at, nor everything waved through
    assert outcomes["IO, open IO"] > N_CASES // 4
    assert outcomes["opened"] > N_CASES // 20


@pytest.mark.timeout(60 + N_CASES // 50)
@pytest.mark.parametrize("index", [0, 1], ids=["first", "second"])
def test_mutated_headers_of_a_part(model: Path, index: int) -> None:
    parts = split(model, 2)
    outcomes = fuzz(parts[index], parts[0])
    assert outcomes["IO, open IO"] > N_CASES // 4
    assert outcomes["opened"] > N_CASES // 50
