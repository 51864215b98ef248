"""The files that the tests of the expert store stand on are what they claim to be."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from expert_models import EXPERT_MODELS, SPLIT_MODELS, write_expert_model
from gguf_bytes import GgufFile, rewrite
from llama_model import LlamaModel
from random_blocks import K_QUANTS, random_blocks

MODELS = [*EXPERT_MODELS, *SPLIT_MODELS]


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_loads_them(name: str, tmp_path: Path) -> None:
    with LlamaModel(write_expert_model(tmp_path, name), n_ctx=64, n_threads=1) as model:
        logits = model.logits(list(range(40, 60)))
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2
    assert len(set(logits.argmax(axis=1))) > 5


@pytest.mark.parametrize("kind", K_QUANTS, ids=lambda kind: kind.name)
def test_random_blocks_have_the_wanted_spread(kind: gguf.GGMLQuantizationType) -> None:
    values = gguf.dequantize(random_blocks(kind, (8, 64, 256), 0.1, np.random.default_rng(0)), kind)
    assert values.shape == (8, 64, 256)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.02
    assert 0.09 < values.std() < 0.11


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_taking_apart_and_putting_together_changes_nothing(name: str, tmp_path: Path) -> None:
    path = write_expert_model(tmp_path, name)
    before = path.read_bytes()
    rewrite(path, lambda file: None)
    assert path.read_bytes() == before


def test_a_split_model_scatters_the_matrices_of_an_expert(tmp_path: Path) -> None:
    first = write_expert_model(tmp_path, "split-q4_k_m-3")
    parts = sorted(tmp_path.glob("*.gguf"))
    assert first == parts[0]
    assert len(parts) == 3
    whole = GgufFile.read(write_expert_model(tmp_path / "whole", "q4_k_m"))
    names = [{tensor.name for tensor in GgufFile.read(part).tensors} for part in parts]
    assert set().union(*names) == {tensor.name for tensor in whole.tensors}
    assert sum(map(len, names)) == len(whole.tensors)
    matrices = {b"blk.1.ffn_%s_exps.weight" % kind for kind in (b"gate", b"up", b"down")}
    assert [len(matrices & part) for part in names] == [1, 1, 1]
