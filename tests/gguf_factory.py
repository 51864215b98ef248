"""Small random GGUFs of the Mixture-of-Experts families that s2moe serves.

Tensor names, layout, router and metadata are the real models'; sizes are shrunk and weights are random, so a
model loads, decodes finite logits and routes, and says nothing. The same arguments give the same file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

from random_blocks import K_QUANTS, random_blocks

FloatArray = npt.NDArray[np.float32]
WeightType = Literal["F32", "F16", "BF16", "Q8_0", "Q4_0"]
Gating = Literal["softmax", "sigmoid", "softmax_weight"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MERGES = (
    "Ġ t|h e|Ġ a|i n|r e|Ġ s|o n|e r|Ġt he|a t|Ġ w|o r|e n|e s|i s|i t|Ġ c|o u|n d|Ġ o|a n|in g|Ġ f|e d|Ġ b"
)


@dataclass(frozen=True)
class ExpertTypes:
    """How the experts of one layer are stored."""

    gate_up: gguf.GGMLQuantizationType
    down: gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Variant:
    """The shape of one architecture. Sizes are in values; those of a row are multiples of 32."""

    arch: str
    tokenizer_pre: str
    gating: Gating
    n_layer: int
    n_expert: int
    n_expert_used: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff_exp: int
    n_ff: int = 0
    """Dense FFN of the leading dense layers, or the size that the architecture also calls feed_forward."""
    n_dense_lead: int = 0
    n_expert_shared: int = 0
    n_group: int = 1
    n_group_used: int = 1
    """Group-limited routing: only experts of this many of `n_group` groups are selected."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_dim: int = 0
    """Of MLA, where only this part of a head is rotated; 0 = the whole head."""
    uncompressed_kv: bool = False
    """MLA as it was converted until April 2025: keys and values of all heads are cached."""
    selection_bias: bool = False
    """exp_probs_b, added to the router's probabilities for the selection alone."""
    merged_gate_up: bool = False
    expert_types: tuple[ExpertTypes, ...] = ()
    """Types of the experts, dealt to the layers in turn; none: the type of the other weights."""
    normalised_weights: bool = True
    weights_scale: float = 1.0

    @property
    def moe_layers(self) -> range:
        return range(self.n_dense_lead, self.n_layer)


_DEEPSEEK: dict[str, Any] = {
    "arch": "deepseek2",
    "n_layer": 3,
    "n_embd": 128,
    "n_head": 4,
    "n_head_kv": 1,
    "head_dim": 32,
    "rope_dim": 16,
    "kv_lora_rank": 64,
    "n_ff": 256,
    "n_ff_exp": 64,
    "n_dense_lead": 1,
}

ARCHITECTURES: dict[str, Variant] = {
    # Mixtral's shape: softmax over the selected, which equals softmax over all, normalised.
    "llama": Variant(
        arch="llama", tokenizer_pre="llama-bpe", gating="softmax", n_layer=2, n_expert=8, n_expert_used=2,
        n_embd=128, n_head=4, n_head_kv=2, head_dim=32, n_ff=128, n_ff_exp=128,
    ),
    "olmoe": Variant(
        arch="olmoe", tokenizer_pre="olmo", gating="softmax", n_layer=3, n_expert=32, n_expert_used=8,
        n_embd=128, n_head=4, n_head_kv=4, head_dim=32, n_ff=64, n_ff_exp=64, normalised_weights=False,
    ),
    "qwen3moe": Variant(
        arch="qwen3moe", tokenizer_pre="qwen2", gating="softmax", n_layer=3, n_expert=32, n_expert_used=8,
        n_embd=128, n_head=4, n_head_kv=2, head_dim=64, n_ff=256, n_ff_exp=64,
    ),
    # DeepSeek-V2-Lite: no low-rank queries, weights of the selected not normalised, two shared experts.
    "deepseek2-lite": Variant(
        **_DEEPSEEK, tokenizer_pre="deepseek-llm", gating="softmax", n_expert=16, n_expert_used=6,
        n_expert_shared=2, normalised_weights=False,
    ),
    "deepseek2-lite-merged": Variant(
        **_DEEPSEEK, tokenizer_pre="deepseek-llm", gating="softmax", n_expert=16, n_expert_used=6,
        n_expert_shared=2, normalised_weights=False, merged_gate_up=True,
    ),
    "deepseek2-lite-2024": Variant(
        **{**_DEEPSEEK, "n_head_kv": 4}, tokenizer_pre="deepseek-llm", gating="softmax", n_expert=16,
        n_expert_used=6, n_expert_shared=2, normalised_weights=False, uncompressed_kv=True,
    ),
    # DeepSeek-V3: sigmoid router with a selection bias, limited to 2 of 4 groups, scaled weights.
    "deepseek2-v3": Variant(
        **_DEEPSEEK, tokenizer_pre="deepseek-v3", gating="sigmoid", n_expert=32, n_expert_used=8,
        n_expert_shared=1, n_group=4, n_group_used=2, q_lora_rank=64, selection_bias=True, weights_scale=2.5,
    ),
    "gpt-oss": Variant(
        arch="gpt-oss", tokenizer_pre="gpt-4o", gating="softmax_weight", n_layer=4, n_expert=16,
        n_expert_used=4, n_embd=128, n_head=4, n_head_kv=2, head_dim=64, n_ff=128, n_ff_exp=128,
        expert_types=(ExpertTypes(gguf.GGMLQuantizationType.MXFP4, gguf.GGMLQuantizationType.MXFP4),),
    ),
}  # fmt: skip
"""Every variant, by the name that `write_random_model` takes; for parametrisation."""


@dataclass(frozen=True)
class Router:
    """What decides the experts of one layer, as stored in the file."""

    weight: FloatArray
    """[n_expert, n_embd]; logits = weight · (normalised FFN input)."""
    bias: FloatArray | None = None
    """[n_expert], added to the logits (gpt-oss)."""
    selection_bias: FloatArray | None = None
    """[n_expert], added to the probabilities for the selection (DeepSeek-V3's exp_probs_b)."""


def write_random_model(
    path: Path,
    model: str | Variant,
    *,
    seed: int = 0,
    weights: WeightType = "F16",
    chat_template: str | None = CHATML,
) -> Variant:
    """Write a variant, given itself or by its name in ARCHITECTURES, with random weights to `path`.

    weights: type of the matrices, but for routers, norms and biases, which are F32, and for experts whose
    types the variant fixes. Returns the variant.
    """
    variant = ARCHITECTURES[model] if isinstance(model, str) else model
    writer = gguf.GGUFWriter(path, variant.arch)
    n_vocab = _add_vocabulary(writer, variant, chat_template)
    _add_hyperparameters(writer, variant, n_vocab)
    _Tensors(writer, variant, gguf.GGMLQuantizationType[weights], np.random.default_rng([seed, 7])).add(
        n_vocab
    )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return variant


def read_routers(path: Path) -> dict[int, Router]:
    """The routers of a GGUF with F32 routers, by layer."""
    stored = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    routers = {}
    for tensor_name, weight in stored.items():
        if tensor_name.endswith(".ffn_gate_inp.weight"):
            layer = int(tensor_name.split(".")[1])
            routers[layer] = Router(
                weight=weight,
                bias=stored.get(f"blk.{layer}.ffn_gate_inp.bias"),
                selection_bias=stored.get(f"blk.{layer}.exp_probs_b.bias"),
            )
    return routers


def select_experts(
    variant: Variant, router: Router, ffn_input: FloatArray, k: int | None = None
) -> npt.NDArray[np.int64]:
    """The experts that the router selects, best first.

    ffn_input: the normalised FFN input, [n_tokens, n_embd]. k: experts per token, the variant's by default.
    Returns [n_tokens, k].
    """
    scores = selection_scores(variant, router, ffn_input)
    return np.argsort(-scores, axis=-1, kind="stable")[:, : k or variant.n_expert_used]


def selection_scores(variant: Variant, router: Router, ffn_input: FloatArray) -> npt.NDArray[np.float64]:
    """What the top-k is taken of, [n_tokens, n_expert]; -inf outside the selected groups."""
    logits = ffn_input.astype(np.float64) @ router.weight.T.astype(np.float64)
    if router.bias is not None:
        logits = logits + router.bias
    if variant.gating == "softmax":
        scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
    elif variant.gating == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = logits
    if router.selection_bias is not None:
        scores = scores + router.selection_bias
    if variant.n_group > 1:
        grouped = scores.reshape(len(scores), variant.n_group, -1)
        group_scores = np.sort(grouped, axis=-1)[:, :, -2:].sum(axis=-1)
        losers = np.argsort(-group_scores, axis=-1, kind="stable")[:, variant.n_group_used :]
        np.put_along_axis(grouped, losers[:, :, None], -np.inf, axis=1)
        scores = grouped.reshape(scores.shape)
    return scores


# ── metadata ────────────────────────────────────────────────────────────────────────────────────


def _add_vocabulary(writer: gguf.GGUFWriter, variant: Variant, chat_template: str | None) -> int:
    """A byte-level BPE that can spell anything; returns its size."""
    merges = _MERGES.split("|")
    tokens = [*_SPECIAL_TOKENS, *_byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    types = [gguf.TokenType.CONTROL] * len(_SPECIAL_TOKENS)
    types += [gguf.TokenType.NORMAL] * (len(tokens) - len(types))
    while len(tokens) % 32:
        types.append(gguf.TokenType.UNUSED)
        tokens.append(f"[PAD{len(tokens)}]")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(variant.tokenizer_pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    return len(tokens)


def _byte_characters() -> list[str]:
    """GPT-2's printable character for each byte."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(256 + hidden.index(byte)) if byte in hidden else chr(byte) for byte in range(256)]


def _add_hyperparameters(writer: gguf.GGUFWriter, variant: Variant, n_vocab: int) -> None:
    writer.add_type("model")
    writer.add_name(f"random {variant.arch}")
    writer.add_vocab_size(n_vocab)
    writer.add_context_length(4096)
    writer.add_block_count(variant.n_layer)
    writer.add_embedding_length(variant.n_embd)
    writer.add_feed_forward_length(variant.n_ff)
    writer.add_head_count(variant.n_head)
    writer.add_head_count_kv(variant.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(variant.n_expert)
    writer.add_expert_used_count(variant.n_expert_used)
    if variant.arch == "deepseek2":
        _add_deepseek2_hyperparameters(writer, variant)
        return
    writer.add_rope_dimension_count(variant.head_dim)
    writer.add_key_length(variant.head_dim)
    writer.add_value_length(variant.head_dim)
    if variant.arch in ("qwen3moe", "gpt-oss"):
        writer.add_expert_feed_forward_length(variant.n_ff_exp)
    if variant.arch == "gpt-oss":
        writer.add_sliding_window(32)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(128)


def _add_deepseek2_hyperparameters(writer: gguf.GGUFWriter, variant: Variant) -> None:
    writer.add_leading_dense_block_count(variant.n_dense_lead)
    writer.add_q_lora_rank(variant.q_lora_rank)
    writer.add_kv_lora_rank(variant.kv_lora_rank)
    if variant.uncompressed_kv:
        writer.add_key_length(variant.head_dim + variant.rope_dim)
        writer.add_value_length(variant.head_dim)
    else:
        # MLA runs as attention with one KV head of kv_lora_rank + rope_dim values.
        writer.add_key_length(variant.kv_lora_rank + variant.rope_dim)
        writer.add_value_length(variant.kv_lora_rank)
        writer.add_key_length_mla(variant.head_dim + variant.rope_dim)
        writer.add_value_length_mla(variant.head_dim)
    writer.add_rope_dimension_count(variant.rope_dim)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(40.0)
    writer.add_rope_scaling_orig_ctx_len(128)
    writer.add_rope_scaling_yarn_log_mul(0.0707)
    writer.add_expert_feed_forward_length(variant.n_ff_exp)
    writer.add_expert_shared_count(variant.n_expert_shared)
    writer.add_expert_weights_scale(variant.weights_scale)
    if not variant.uncompressed_kv:  # files of that time say neither
        writer.add_expert_weights_norm(variant.normalised_weights)
        sigmoid = variant.gating == "sigmoid"
        writer.add_expert_gating_func(
            gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX
        )
    if variant.n_group > 1:
        writer.add_expert_group_count(variant.n_group)
        writer.add_expert_group_used_count(variant.n_group_used)


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Tensors:
    """Adds the random tensors of a variant to a writer."""

    writer: gguf.GGUFWriter
    variant: Variant
    weight_type: gguf.GGMLQuantizationType
    random: np.random.Generator

    def add(self, n_vocab: int) -> None:
        v = self.variant
        self._matrix("token_embd", n_vocab, v.n_embd, std=1.0)
        for layer in range(v.n_layer):
            self._norm(f"blk.{layer}.attn_norm", v.n_embd)
            {"deepseek2": self._latent_attention}.get(v.arch, self._attention)(f"blk.{layer}")
            self._norm(
                f"blk.{layer}.{'post_attention_norm' if v.arch == 'gpt-oss' else 'ffn_norm'}", v.n_embd
            )
            if layer in v.moe_layers:
                self._experts(f"blk.{layer}", self._expert_types(layer))
            else:
                self._dense_ffn(f"blk.{layer}")
        self._norm("output_norm", v.n_embd)
        self._matrix("output", n_vocab, v.n_embd)

    def _attention(self, block: str) -> None:
        v = self.variant
        q, kv = v.n_head * v.head_dim, v.n_head_kv * v.head_dim
        for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            self._matrix(f"{block}.{name}", rows, v.n_embd)
        self._matrix(f"{block}.attn_output", v.n_embd, q)
        if v.arch == "olmoe":
            self._norm(f"{block}.attn_q_norm", q)
            self._norm(f"{block}.attn_k_norm", kv)
        elif v.arch == "qwen3moe":
            self._norm(f"{block}.attn_q_norm", v.head_dim)
            self._norm(f"{block}.attn_k_norm", v.head_dim)
        elif v.arch == "gpt-oss":
            for name, size in (("attn_q", q), ("attn_k", kv), ("attn_v", kv), ("attn_output", v.n_embd)):
                self._vector(f"{block}.{name}.bias", size)
            self._vector(f"{block}.attn_sinks.weight", v.n_head, std=1.0)

    def _latent_attention(self, block: str) -> None:
        """DeepSeek's MLA; the up-projections of keys and values are stored per head, once together."""
        v = self.variant
        q = v.n_head * (v.head_dim + v.rope_dim)
        if v.q_lora_rank:
            self._matrix(f"{block}.attn_q_a", v.q_lora_rank, v.n_embd)
            self._norm(f"{block}.attn_q_a_norm", v.q_lora_rank)
            self._matrix(f"{block}.attn_q_b", q, v.q_lora_rank)
        else:
            self._matrix(f"{block}.attn_q", q, v.n_embd)
        self._matrix(f"{block}.attn_kv_a_mqa", v.kv_lora_rank + v.rope_dim, v.n_embd)
        self._norm(f"{block}.attn_kv_a_norm", v.kv_lora_rank)
        if v.uncompressed_kv:
            self._matrix(f"{block}.attn_kv_b", v.n_head * 2 * v.head_dim, v.kv_lora_rank)
        else:
            self._matrix(f"{block}.attn_k_b", v.n_head, v.kv_lora_rank, v.head_dim)
            self._matrix(f"{block}.attn_v_b", v.n_head, v.head_dim, v.kv_lora_rank)
        self._matrix(f"{block}.attn_output", v.n_embd, v.n_head * v.head_dim)

    def _dense_ffn(self, block: str, suffix: str = "", n_ff: int | None = None) -> None:
        v = self.variant
        n_ff = n_ff or v.n_ff
        self._matrix(f"{block}.ffn_gate{suffix}", n_ff, v.n_embd)
        self._matrix(f"{block}.ffn_up{suffix}", n_ff, v.n_embd)
        self._matrix(f"{block}.ffn_down{suffix}", v.n_embd, n_ff)

    def _expert_types(self, layer: int) -> ExpertTypes:
        types = self.variant.expert_types or (ExpertTypes(self.weight_type, self.weight_type),)
        return types[layer % len(types)]

    def _experts(self, block: str, types: ExpertTypes) -> None:
        v = self.variant
        router = self._normal(v.n_expert, v.n_embd, std=v.n_embd**-0.5)
        self.writer.add_tensor(f"{block}.ffn_gate_inp.weight", router)
        if v.selection_bias:
            self._vector(f"{block}.exp_probs_b.bias", v.n_expert, std=0.05)
        projections = {"gate": v.n_ff_exp, "up": v.n_ff_exp}
        if v.merged_gate_up:
            projections = {"gate_up": 2 * v.n_ff_exp}
        for name, rows in projections.items():
            self._matrix(f"{block}.ffn_{name}_exps", v.n_expert, rows, v.n_embd, type=types.gate_up)
        self._matrix(f"{block}.ffn_down_exps", v.n_expert, v.n_embd, v.n_ff_exp, type=types.down)
        if v.n_expert_shared:
            self._dense_ffn(block, "_shexp", v.n_expert_shared * v.n_ff_exp)
        if v.arch == "gpt-oss":
            self._vector(f"{block}.ffn_gate_inp.bias", v.n_expert, std=0.5)
            for name, size in {**projections, "down": v.n_embd}.items():
                self.writer.add_tensor(
                    f"{block}.ffn_{name}_exps.bias", self._normal(v.n_expert, size, std=0.1)
                )

    def _matrix(
        self, name: str, *shape: int, std: float | None = None, type: gguf.GGMLQuantizationType | None = None
    ) -> None:
        """A weight [..., n_out, n_in] that keeps the variance of its input unless `std` is given."""
        std = std or shape[-1] ** -0.5
        stored_type = type or self.weight_type
        if stored_type in K_QUANTS:
            stored = random_blocks(stored_type, shape, std, self.random)
        else:
            stored = gguf.quantize(self._normal(*shape, std=std), stored_type)
        self.writer.add_tensor(f"{name}.weight", stored, raw_dtype=stored_type)

    def _norm(self, name: str, size: int) -> None:
        self.writer.add_tensor(f"{name}.weight", 1 + self._normal(size, std=0.1))

    def _vector(self, name: str, size: int, std: float = 0.1) -> None:
        self.writer.add_tensor(name, self._normal(size, std=std))

    def _normal(self, *shape: int, std: float) -> FloatArray:
        return self.random.standard_normal(shape, dtype=np.float32) * np.float32(std)
