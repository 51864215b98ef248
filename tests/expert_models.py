"""Random models for the expert store: every layout and type of experts that GGUFs come with.

Rows are long enough for blocks of 256 values, experts are few and layers three or four, so that a cache at
its floor evicts in every decode and a model is written and loaded in a moment.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf

from gguf_bytes import split
from gguf_factory import ARCHITECTURES, ExpertTypes, Variant, write_random_model

_Q = gguf.GGMLQuantizationType
_WIDE = replace(ARCHITECTURES["qwen3moe"], n_expert=12, n_expert_used=3, n_embd=256, n_ff=256, n_ff_exp=256)
_GPT_OSS = replace(ARCHITECTURES["gpt-oss"], n_expert=12, n_expert_used=4, n_embd=256, n_ff=256, n_ff_exp=256)


def _all(kind: gguf.GGMLQuantizationType) -> tuple[ExpertTypes, ...]:
    return (ExpertTypes(kind, kind),)


EXPERT_MODELS: dict[str, Variant] = {
    **ARCHITECTURES,
    # Q4_K_M keeps half of the down matrices at 6 bits: layers of two sizes
    "q4_k_m": replace(
        _WIDE, n_layer=4, expert_types=(ExpertTypes(_Q.Q4_K, _Q.Q6_K), ExpertTypes(_Q.Q4_K, _Q.Q4_K))
    ),
    "q4_0": replace(_WIDE, expert_types=_all(_Q.Q4_0)),
    "q8_0": replace(_WIDE, expert_types=_all(_Q.Q8_0)),
    "q5_k": replace(_WIDE, expert_types=_all(_Q.Q5_K)),
    "q2_k": replace(_WIDE, expert_types=(ExpertTypes(_Q.Q2_K, _Q.Q3_K),)),
    "iq4_nl": replace(_WIDE, expert_types=_all(_Q.IQ4_NL)),
    "f16": replace(_WIDE, expert_types=_all(_Q.F16)),
    "f32": replace(_WIDE, n_expert=8, expert_types=_all(_Q.F32)),
    "olmoe-q4_k": replace(
        ARCHITECTURES["olmoe"], n_expert=16, n_embd=256, head_dim=64, n_ff=256, n_ff_exp=256,
        expert_types=_all(_Q.Q4_K),
    ),
    "llama-q4_0": replace(
        ARCHITECTURES["llama"], n_layer=3, n_embd=256, head_dim=64, n_ff=256, n_ff_exp=256,
        expert_types=_all(_Q.Q4_0),
    ),
    "deepseek2-merged-q4_k": replace(
        ARCHITECTURES["deepseek2-lite-merged"], n_layer=4, n_embd=256, n_ff=512, n_ff_exp=256,
        expert_types=(ExpertTypes(_Q.Q4_K, _Q.Q6_K), ExpertTypes(_Q.Q4_K, _Q.Q8_0)),
    ),
    "deepseek2-v3-q4_k": replace(
        ARCHITECTURES["deepseek2-v3"], n_layer=4, n_expert=16, n_expert_used=4, n_embd=256, n_ff=512,
        n_ff_exp=256, expert_types=(ExpertTypes(_Q.Q4_K, _Q.Q6_K),),
    ),
    "gpt-oss-mxfp4": replace(_GPT_OSS, expert_types=_all(_Q.MXFP4)),
    # 100 rows are no multiple of 8: gate and up stay in the file's layout, with the plain kernels
    "gpt-oss-odd": replace(_GPT_OSS, n_ff_exp=100, expert_types=(ExpertTypes(_Q.MXFP4, _Q.F16),)),
}  # fmt: skip
"""Every variant, by the name that `write_expert_model` takes; for parametrisation."""

SPLIT_MODELS: dict[str, tuple[str, int]] = {
    "split-q4_k_m-3": ("q4_k_m", 3),
    "split-gpt-oss-mxfp4-2": ("gpt-oss-mxfp4", 2),
}
"""Models of EXPERT_MODELS in several files: {name: (model, number of files)}."""


def variant_of(name: str) -> Variant:
    return EXPERT_MODELS[SPLIT_MODELS[name][0] if name in SPLIT_MODELS else name]


def write_expert_model(folder: Path, name: str, *, n_files: int | None = None) -> Path:
    """Writes a model of EXPERT_MODELS or SPLIT_MODELS, or one of the former in `n_files` files, into
    `folder`. Returns its (first) file.
    """
    variant_name, usual_files = SPLIT_MODELS.get(name, (name, 1))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.gguf"
    write_random_model(path, EXPERT_MODELS[variant_name])
    n_files = n_files or usual_files
    if n_files == 1:
        return path
    parts = split(path, n_files)
    path.unlink()
    return parts[0]
