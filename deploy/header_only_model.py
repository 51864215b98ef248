"""GGUFs that have a model's header and none of its weights, to plan for models that are not at hand.

The header lists every tensor with the shape and type that it has in a published file. What follows is a hole
of the right size, so that the disk stores the header alone and `s2moe inspect` sees the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import gguf
import numpy as np

_Type = gguf.GGMLQuantizationType
Dims = tuple[int, ...]
"""As numpy has them: the longest stride first, a row last."""

# What llama.cpp stores instead where rows are no multiple of 256 values (src/llama-quant.cpp)
_SHORT_ROWS = {_Type.Q4_K: _Type.Q5_0, _Type.Q6_K: _Type.Q8_0}


@dataclass(frozen=True)
class Shape:
    """The shape of a model. Sizes are in values."""

    name: str
    source: str
    """Where the numbers are published."""
    architecture: Literal["olmoe", "deepseek2", "qwen3moe", "gpt-oss"]
    tokenizer_pre: str
    file_type: Literal["Q4_K_M", "MXFP4"]
    """How the file is quantised: what `llama-quantize` calls so; MXFP4: the experts, Q8_0 the rest."""
    n_ctx_train: int
    n_vocab: int
    n_merges: int
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_ff: int
    """Of the dense layers, or the size that the architecture also calls feed_forward."""
    n_dense_lead: int = 0
    n_expert_shared: int = 0
    kv_lora_rank: int = 0
    rope_dim: int = 0
    """Of latent attention, where only this part of a head is rotated."""
    sliding_window: int = 0

    def tensors(self) -> Iterator[tuple[str, Dims]]:
        """Names and dimensions, in the order of the file."""
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        for layer in range(self.n_layer):
            for name, dims in self._layer(layer):
                yield f"blk.{layer}.{name}", dims
        yield "output_norm.weight", (self.n_embd,)
        yield "output.weight", (self.n_vocab, self.n_embd)

    def tensor_type(self, name: str, dims: Dims) -> gguf.GGMLQuantizationType:
        """As llama.cpp chooses it for the file type (src/llama-quant.cpp)."""
        if len(dims) < 2 or name.endswith(".bias") or "ffn_gate_inp" in name:
            return _Type.F32
        if self.file_type == "MXFP4":
            return _Type.MXFP4 if "_exps" in name else _Type.Q8_0
        wanted = _Type.Q6_K if self._gets_more_bits(name) else _Type.Q4_K
        block_values, _ = gguf.GGML_QUANT_SIZES[wanted]
        return wanted if dims[-1] % block_values == 0 else _SHORT_ROWS[wanted]

    def _layer(self, layer: int) -> Iterator[tuple[str, Dims]]:
        yield "attn_norm.weight", (self.n_embd,)
        yield from self._latent_attention() if self.kv_lora_rank else self._attention()
        yield "post_attention_norm.weight" if self._is_gpt_oss else "ffn_norm.weight", (self.n_embd,)
        if layer < self.n_dense_lead:
            yield from self._dense_ffn("", self.n_ff)
            return
        yield "ffn_gate_inp.weight", (self.n_expert, self.n_embd)
        rows = {"gate": self.n_ff_exp, "up": self.n_ff_exp, "down": self.n_embd}
        for part, n_rows in rows.items():
            n_columns = self.n_ff_exp if part == "down" else self.n_embd
            yield f"ffn_{part}_exps.weight", (self.n_expert, n_rows, n_columns)
        if self.n_expert_shared:
            yield from self._dense_ffn("_shexp", self.n_expert_shared * self.n_ff_exp)
        if self._is_gpt_oss:
            yield "ffn_gate_inp.bias", (self.n_expert,)
            for part, n_rows in rows.items():
                yield f"ffn_{part}_exps.bias", (self.n_expert, n_rows)

    def _attention(self) -> Iterator[tuple[str, Dims]]:
        q, kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        rows = {"attn_q": q, "attn_k": kv, "attn_v": kv}
        for name, n_rows in rows.items():
            yield f"{name}.weight", (n_rows, self.n_embd)
        yield "attn_output.weight", (self.n_embd, q)
        if self.architecture == "olmoe":
            yield "attn_q_norm.weight", (q,)
            yield "attn_k_norm.weight", (kv,)
        elif self.architecture == "qwen3moe":
            yield "attn_q_norm.weight", (self.head_dim,)
            yield "attn_k_norm.weight", (self.head_dim,)
        elif self._is_gpt_oss:
            for name, n_rows in {**rows, "attn_output": self.n_embd}.items():
                yield f"{name}.bias", (n_rows,)
            yield "attn_sinks.weight", (self.n_head,)

    def _latent_attention(self) -> Iterator[tuple[str, Dims]]:
        """As converted until April 2025, with one matrix that restores keys and values: these are cached."""
        yield "attn_q.weight", (self.n_head * (self.head_dim + self.rope_dim), self.n_embd)
        yield "attn_kv_a_mqa.weight", (self.kv_lora_rank + self.rope_dim, self.n_embd)
        yield "attn_kv_a_norm.weight", (self.kv_lora_rank,)
        yield "attn_kv_b.weight", (self.n_head * 2 * self.head_dim, self.kv_lora_rank)
        yield "attn_output.weight", (self.n_embd, self.n_head * self.head_dim)

    def _dense_ffn(self, suffix: str, n_ff: int) -> Iterator[tuple[str, Dims]]:
        yield f"ffn_gate{suffix}.weight", (n_ff, self.n_embd)
        yield f"ffn_up{suffix}.weight", (n_ff, self.n_embd)
        yield f"ffn_down{suffix}.weight", (self.n_embd, n_ff)

    def _gets_more_bits(self, name: str) -> bool:
        """Q4_K_M has 6 bits for the output matrix, and for values and down matrices of half of the layers."""
        part, *rest = name.split(".")
        if part != "blk":
            return part == "output"
        kind = rest[1]
        if kind != "attn_v" and not kind.startswith("ffn_down"):
            return False
        layer, eighth = int(rest[0]), self.n_layer // 8
        return layer < eighth or layer >= 7 * self.n_layer // 8 or (layer - eighth) % 3 == 2

    @property
    def _is_gpt_oss(self) -> bool:
        return self.architecture == "gpt-oss"


def write_header_only(path: Path, shape: Shape) -> None:
    """Writes the model's header to `path`, and makes the file as large as the published one."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    _add_metadata(writer, shape)
    _add_vocabulary(writer, shape)
    data_bytes = 0
    for name, dims in shape.tensors():
        kind = shape.tensor_type(name, dims)
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        n_bytes = prod(dims) // block_values * block_bytes
        writer.add_tensor_info(name, dims, np.dtype(np.float32), n_bytes, raw_dtype=kind)
        data_bytes += gguf.GGUFWriter.ggml_pad(n_bytes, writer.data_alignment)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    header_bytes = gguf.GGUFWriter.ggml_pad(path.stat().st_size, writer.data_alignment)
    os.truncate(path, header_bytes + data_bytes)


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_type("model")
    writer.add_name(shape.name)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_block_count(shape.n_layer)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(shape.n_expert)
    writer.add_expert_used_count(shape.n_expert_used)
    writer.add_expert_feed_forward_length(shape.n_ff_exp)
    if shape.kv_lora_rank:
        _add_latent_attention(writer, shape)
    else:
        writer.add_rope_dimension_count(shape.head_dim)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    if shape.sliding_window:
        writer.add_sliding_window(shape.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)


def _add_latent_attention(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_kv_lora_rank(shape.kv_lora_rank)
    writer.add_key_length(shape.head_dim + shape.rope_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.rope_dim)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(40.0)
    writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_rope_scaling_yarn_log_mul(0.0707)
    writer.add_leading_dense_block_count(shape.n_dense_lead)
    writer.add_expert_shared_count(shape.n_expert_shared)
    writer.add_expert_weights_scale(1.0)


def _add_vocabulary(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """As many tokens and merges as the model has, made up: they take memory in the engine."""
    tokens = ["<|endoftext|>", "<|end|>", *(chr(256 + byte) for byte in range(256))]
    tokens += [f"t{index:06x}" for index in range(shape.n_vocab - len(tokens))]
    types = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (shape.n_vocab - 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.tokenizer_pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"m{index:05x} n{index:05x}" for index in range(shape.n_merges)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
