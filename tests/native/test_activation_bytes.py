"""What a GPU's plan adds for experts that are computed there is what llama.cpp's buffers grow by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from s2moe.engine.contexts import expert_width
from s2moe.engine.gpu_plan import activation_bytes
from s2moe.engine.native import Library
from s2moe.engine.native_experts import context_memory

from gguf_factory import ARCHITECTURES, Variant, write_random_model

N_BATCH = 256


def variant_of_width(architecture: str, n_ff: int) -> Variant:
    variant = replace(ARCHITECTURES[architecture], n_ff_exp=n_ff)
    # two of the architectures have one size for experts and others
    return replace(variant, n_ff=n_ff) if architecture in ("llama", "olmoe") else variant


def buffers(library: Library, path: Path, n_batch: int) -> tuple[int, int]:
    """Bytes of a context's buffers, which lie on the CPU here, and the width of the model's experts."""
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.no_alloc = True
    model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    params: Any = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = n_batch
    params.n_outputs_max = 1
    context = llama_cpp.llama_init_from_model(model, params)
    try:
        return context_memory(library, context).compute_bytes, expert_width(llama_cpp, model)
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_formula_is_what_buffers_grow_by(architecture: str, library: Library, tmp_path: Path) -> None:
    needed: list[int] = []
    planned: list[int] = []
    for n_ff in (512, 1024):
        path = tmp_path / f"{n_ff}.gguf"
        variant = write_random_model(path, variant_of_width(architecture, n_ff), weights="Q4_0")
        compute_bytes, width = buffers(library, path, N_BATCH)
        assert width == n_ff
        needed.append(compute_bytes)
        planned.append(activation_bytes(N_BATCH, variant.n_expert_used, width, variant.n_embd))
    assert planned[1] - planned[0] == pytest.approx(needed[1] - needed[0], rel=0.01)
    assert planned[1] > 0.9 * needed[1]
