"""A small random nomic-bert-moe: an encoder with experts in every other layer, which gives embeddings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from gguf_factory import ARCHITECTURES, FloatArray, Variant, _add_vocabulary, _Tensors

N_CTX_TRAIN = 96
N_EMBD = 64
_N_FF = 96
_ENCODER = replace(
    ARCHITECTURES["llama"], arch="nomic-bert-moe", n_layer=2, n_expert=4, n_expert_used=2, n_embd=N_EMBD,
    n_head=4, n_head_kv=4, head_dim=16, n_ff=_N_FF, n_ff_exp=_N_FF,
)  # fmt: skip


def write_embedding_model(
    path: Path, *, pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN, seed: int = 0
) -> Path:
    writer = gguf.GGUFWriter(path, _ENCODER.arch)
    writer.add_type("model")
    writer.add_name("random encoder")
    _add_hyperparameters(writer, _ENCODER, pooling)
    n_vocab = _add_vocabulary(writer, _ENCODER, None)
    writer.add_vocab_size(n_vocab)
    writer.add_token_type_count(2)
    tensors = _EncoderTensors(
        writer, _ENCODER, gguf.GGMLQuantizationType.F16, np.random.default_rng([seed, 7])
    )
    tensors.add(n_vocab)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return path


def _add_hyperparameters(writer: gguf.GGUFWriter, variant: Variant, pooling: gguf.PoolingType | None) -> None:
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_block_count(variant.n_layer)
    writer.add_embedding_length(variant.n_embd)
    writer.add_feed_forward_length(variant.n_ff)
    writer.add_head_count(variant.n_head)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(variant.n_expert)
    writer.add_expert_used_count(variant.n_expert_used)
    writer.add_moe_every_n_layers(2)
    if pooling is not None:
        writer.add_pooling_type(pooling)


class _EncoderTensors(_Tensors):
    def add(self, n_vocab: int) -> None:
        v = self.variant
        self._matrix("token_embd", n_vocab, v.n_embd, std=1.0)
        self.writer.add_tensor("token_types.weight", self._normal(2, v.n_embd, std=0.1))
        self._layer_norm("token_embd_norm", v.n_embd)
        for layer in range(v.n_layer):
            block = f"blk.{layer}"
            self._matrix(f"{block}.attn_qkv", 3 * v.n_embd, v.n_embd)
            self._matrix(f"{block}.attn_output", v.n_embd, v.n_embd)
            self._layer_norm(f"{block}.attn_output_norm", v.n_embd)
            if layer % 2:
                router: FloatArray = self._normal(v.n_expert, v.n_embd, std=v.n_embd**-0.5)
                self.writer.add_tensor(f"{block}.ffn_gate_inp.weight", router)
                self._matrix(f"{block}.ffn_up_exps", v.n_expert, v.n_ff, v.n_embd)
                self._matrix(f"{block}.ffn_down_exps", v.n_expert, v.n_embd, v.n_ff)
            else:
                self._matrix(f"{block}.ffn_up", v.n_ff, v.n_embd)
                self._matrix(f"{block}.ffn_down", v.n_embd, v.n_ff)
            self._layer_norm(f"{block}.layer_output_norm", v.n_embd)

    def _layer_norm(self, name: str, size: int) -> None:
        self._norm(name, size)
        self._vector(f"{name}.bias", size)
