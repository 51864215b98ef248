"""The random models of the factory are what the tests of every architecture stand on."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_factory import (
    ARCHITECTURES,
    WeightType,
    read_routers,
    select_experts,
    selection_scores,
    write_random_model,
)
from llama_model import LlamaModel

PROMPT = list(range(40, 88))


@pytest.mark.parametrize("weights", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_model_loads_and_decodes_finite_logits(name: str, weights: WeightType, tmp_path: Path) -> None:
    write_random_model(tmp_path / "m.gguf", name, weights=weights)
    with LlamaModel(tmp_path / "m.gguf", n_ctx=128, n_threads=1) as model:
        logits = model.logits(PROMPT)
        assert np.isfinite(logits).all()
        assert logits.std() > 0.1
        following = model.decode([5], position=len(PROMPT))
        assert np.isfinite(following).all()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_number_of_experts_used_changes_the_logits(name: str, tmp_path: Path) -> None:
    variant = write_random_model(tmp_path / "m.gguf", name)
    with LlamaModel(tmp_path / "m.gguf", n_ctx=128, n_threads=1) as model:
        exact = model.logits(PROMPT)
    with LlamaModel(tmp_path / "m.gguf", n_ctx=128, n_threads=1, experts_used=variant.n_expert_used) as model:
        assert np.array_equal(model.logits(PROMPT), exact)
    with LlamaModel(tmp_path / "m.gguf", n_ctx=128, n_threads=1, experts_used=1) as model:
        assert not np.allclose(model.logits(PROMPT), exact)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vocabulary_spells_any_text_and_the_chat_template_applies(name: str, tmp_path: Path) -> None:
    write_random_model(tmp_path / "m.gguf", name)
    with LlamaModel(tmp_path / "m.gguf", n_ctx=64, n_threads=1) as model:
        text = "the cat in the hat, naïve 漢字 🙂"
        assert model.detokenize(model.tokenize(text)) == text
        prompt = model.chat_prompt(("user", "hi"))
        assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert model.tokenize(prompt, parse_special=True)[0] == 1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_same_seed_gives_the_same_file_and_another_seed_another(name: str, tmp_path: Path) -> None:
    for file_name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_model(tmp_path / file_name, name, seed=seed)
    first, second, other = ((tmp_path / file_name).read_bytes() for file_name in "abc")
    assert first == second
    assert first != other


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_routers_read_back_select_varied_experts(name: str, tmp_path: Path) -> None:
    variant = write_random_model(tmp_path / "m.gguf", name)
    routers = read_routers(tmp_path / "m.gguf")
    assert list(routers) == list(variant.moe_layers)
    inputs = np.random.default_rng(0).standard_normal((64, variant.n_embd)).astype(np.float32)
    for router in routers.values():
        assert router.weight.shape == (variant.n_expert, variant.n_embd)
        assert (router.bias is not None) == (name == "gpt-oss")
        assert (router.selection_bias is not None) == (name == "deepseek2-v3")
        selected = select_experts(variant, router, inputs)
        assert selected.shape == (64, variant.n_expert_used)
        assert len(np.unique(selected)) > variant.n_expert // 2
        usable = np.isfinite(selection_scores(variant, router, inputs)).sum(axis=-1)
        assert (usable == variant.n_expert * variant.n_group_used // variant.n_group).all()


def test_families_differ_where_the_real_ones_do(tmp_path: Path) -> None:
    tensors = {}
    for name in ARCHITECTURES:
        write_random_model(tmp_path / "m.gguf", name, weights="Q8_0")
        tensors[name] = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert "blk.0.ffn_gate_inp.weight" not in tensors["deepseek2-lite"]
    assert "blk.1.ffn_up_shexp.weight" in tensors["deepseek2-lite"]
    assert "blk.1.attn_q_a.weight" not in tensors["deepseek2-lite"]
    assert "blk.1.attn_q_a.weight" in tensors["deepseek2-v3"]
    assert "blk.1.ffn_gate_up_exps.weight" in tensors["deepseek2-lite-merged"]
    assert "blk.1.ffn_gate_exps.weight" not in tensors["deepseek2-lite-merged"]
    assert "blk.0.attn_sinks.weight" in tensors["gpt-oss"]
    assert tensors["gpt-oss"]["blk.0.ffn_up_exps.weight"].tensor_type == gguf.GGMLQuantizationType.MXFP4
    assert tensors["gpt-oss"]["blk.0.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32
