"""Small random models that cannot be drafted for: no experts, or a state that cannot be rolled back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from gguf_factory import ARCHITECTURES, Variant, _add_vocabulary, _Tensors, write_random_model

_CONV_LENGTH = 3
_HYBRID = replace(
    ARCHITECTURES["qwen3moe"], arch="lfm2moe", gating="sigmoid", n_layer=4, n_expert=8, n_expert_used=2,
    n_embd=64, n_head=4, n_head_kv=2, head_dim=16, n_ff=128, n_ff_exp=32, n_dense_lead=1, selection_bias=True,
)  # fmt: skip
_RECURRENT_LAYERS = (0, 2)
"""Of `_HYBRID`: a short convolution instead of attention."""


def write_dense_model(path: Path) -> Path:
    """Llama's architecture without experts."""
    llama = ARCHITECTURES["llama"]
    write_random_model(path, replace(llama, n_expert=0, n_expert_used=0, n_dense_lead=llama.n_layer))
    return path


def write_hybrid_model(path: Path) -> Path:
    """LFM2-MoE: experts, attention in some layers and a convolution with a state in the others."""
    writer = gguf.GGUFWriter(path, _HYBRID.arch)
    n_vocab = _add_vocabulary(writer, _HYBRID, None)
    _add_hyperparameters(writer, _HYBRID, n_vocab)
    _HybridTensors(writer, _HYBRID, gguf.GGMLQuantizationType.F16, np.random.default_rng([0, 7])).add(n_vocab)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return path


def _add_hyperparameters(writer: gguf.GGUFWriter, variant: Variant, n_vocab: int) -> None:
    writer.add_vocab_size(n_vocab)
    writer.add_context_length(4096)
    writer.add_block_count(variant.n_layer)
    writer.add_embedding_length(variant.n_embd)
    writer.add_feed_forward_length(variant.n_ff)
    writer.add_head_count(variant.n_head)
    writer.add_head_count_kv(
        [0 if layer in _RECURRENT_LAYERS else variant.n_head_kv for layer in range(variant.n_layer)]
    )
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_shortconv_l_cache(_CONV_LENGTH)
    writer.add_leading_dense_block_count(variant.n_dense_lead)
    writer.add_expert_count(variant.n_expert)
    writer.add_expert_used_count(variant.n_expert_used)
    writer.add_expert_feed_forward_length(variant.n_ff_exp)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


class _HybridTensors(_Tensors):
    def add(self, n_vocab: int) -> None:
        v = self.variant
        self._matrix("token_embd", n_vocab, v.n_embd, std=1.0)
        self._norm("token_embd_norm", v.n_embd)
        for layer in range(v.n_layer):
            block = f"blk.{layer}"
            self._norm(f"{block}.attn_norm", v.n_embd)
            if layer in _RECURRENT_LAYERS:
                self._convolution(block)
            else:
                self._attention(block)
                self._norm(f"{block}.attn_q_norm", v.head_dim)
                self._norm(f"{block}.attn_k_norm", v.head_dim)
            self._norm(f"{block}.ffn_norm", v.n_embd)
            if layer in v.moe_layers:
                self._experts(block, self._expert_types(layer))
            else:
                self._dense_ffn(block)

    def _convolution(self, block: str) -> None:
        n_embd = self.variant.n_embd
        kernel = self._normal(n_embd, _CONV_LENGTH, std=0.5)
        self.writer.add_tensor(f"{block}.shortconv.conv.weight", kernel)
        self._matrix(f"{block}.shortconv.in_proj", 3 * n_embd, n_embd)
        self._matrix(f"{block}.shortconv.out_proj", n_embd, n_embd)
