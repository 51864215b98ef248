"""The recorded ids are those that numpy finds from the file's router and the captured FFN input."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from s2moe.engine.native import Library, library_dir

from gguf_factory import ARCHITECTURES, read_routers, selection_scores

N_TOKENS = 13
TIE = 1e-4
"""Selection scores closer than this may swap: the library sums in another order than numpy."""

FFN_INPUT_NAMES = {"gpt-oss": "attn_post_norm"}


class Capture:
    """Copies named tensors of a decode to numpy, through the scheduler's evaluation callback."""

    def __init__(self, llama_cpp: Any, prefix: str) -> None:
        self._ggml = ctypes.CDLL(str(library_dir() / "libggml-base.so"))
        self._ggml.ggml_get_name.restype = ctypes.c_char_p
        self._ggml.ggml_nbytes.restype = ctypes.c_size_t
        for name in ("ggml_get_name", "ggml_nbytes"):
            getattr(self._ggml, name).argtypes = [ctypes.c_void_p]
        self._ggml.ggml_backend_tensor_get.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
        ]
        self._prefix = prefix
        self.rows: dict[int, npt.NDArray[np.float32]] = {}
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._receive)

    def _receive(self, tensor: int, ask: bool, _user_data: Any) -> bool:
        name, _, layer = self._ggml.ggml_get_name(tensor).decode().rpartition("-")
        if name != self._prefix or not layer.isdecimal():
            return not ask
        if not ask:
            data = np.empty(self._ggml.ggml_nbytes(tensor) // 4, np.float32)
            self._ggml.ggml_backend_tensor_get(tensor, data.ctypes.data, 0, data.nbytes)
            self.rows[int(layer)] = data
        return True


@contextmanager
def open_context(path: Path, capture: Capture | None = None) -> Iterator[tuple[Any, Any]]:
    """Yields (model, context) of llama.h."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads = 256, 64, 64, 2
    if capture is not None:
        params.cb_eval = capture.callback
    context = llama_cpp.llama_init_from_model(model, params)
    assert context
    try:
        yield model, context
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def assert_same_choice(
    recorded: npt.NDArray[np.int32], scores: npt.NDArray[np.float64], *, where: str
) -> None:
    """recorded: [n_tokens, k], best first; scores: [n_tokens, n_expert], -inf for what may not be chosen."""
    k = recorded.shape[1]
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    assert (recorded >= 0).all(), where
    for token, (ids, best) in enumerate(zip(recorded, expected, strict=True)):
        assert len(set(ids)) == k, f"{where}, token {token}: {ids} repeats an expert"
        difference = np.abs(scores[token][ids] - scores[token][best])
        assert difference.max() < TIE, f"{where}, token {token}: recorded {ids}, numpy {best}"


@pytest.mark.parametrize("n_expert_used", [0, 1], ids=["all", "draft"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recorded_ids_equal_numpy(name: str, n_expert_used: int, random_model: Callable[[str], Path]) -> None:
    import llama_cpp

    variant = ARCHITECTURES[name]
    path = random_model(name)
    library = Library()
    capture = Capture(llama_cpp, FFN_INPUT_NAMES.get(variant.arch, "ffn_norm"))
    with open_context(path, capture) as (_, context):
        library.set_n_expert_used(context, n_expert_used)
        library.set_router_recording(context, True)
        library.decode(context, list(range(5, 5 + N_TOKENS)), 0, all_logits=True)
        ids = library.router_ids(context)

    routers = read_routers(path)
    assert ids.shape == (variant.n_layer, N_TOKENS, variant.n_expert_used)
    assert sorted(routers) == [il for il in range(variant.n_layer) if (ids[il] >= 0).any()]
    for layer, router in routers.items():
        ffn_input = capture.rows[layer].reshape(N_TOKENS, variant.n_embd)
        scores = selection_scores(variant, router, ffn_input)
        assert_same_choice(ids[layer], scores, where=f"{name}, layer {layer}")


def test_recorded_ids_of_the_demo_model(tiny_model_path: Path) -> None:
    import gguf
    import llama_cpp

    library = Library()
    capture = Capture(llama_cpp, "ffn_norm")
    with open_context(tiny_model_path, capture) as (model, context):
        info = library.moe_info(model)
        library.set_router_recording(context, True)
        library.decode(context, list(range(100, 100 + N_TOKENS)), 0, all_logits=True)
        ids = library.router_ids(context)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny_model_path).tensors}
    for layer in range(info.n_layer):
        router = tensors[f"blk.{layer}.ffn_gate_inp.weight"].data.astype(np.float64)
        logits = capture.rows[layer].reshape(N_TOKENS, -1).astype(np.float64) @ router.T
        assert_same_choice(ids[layer], logits, where=f"layer {layer}")


def test_a_batch_of_several_micro_batches_is_recorded_in_its_order(
    random_model: Callable[[str], Path],
) -> None:
    """llama_decode cuts a batch larger than n_ubatch; the recording must not show it."""
    import llama_cpp

    library = Library()
    tokens = list(range(3, 3 + 60))
    results = []
    for n_ubatch in (64, 16):
        model = llama_cpp.llama_model_load_from_file(
            str(random_model("olmoe")).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 128, 64, n_ubatch
        context = llama_cpp.llama_init_from_model(model, params)
        library.set_router_recording(context, True)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, i % 3 == 0
            batch.seq_id[i][0] = 0
        assert llama_cpp.llama_decode(context, batch) == 0
        results.append(library.router_ids(context))
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    whole, cut = results
    assert (whole[-1][0::3] >= 0).all()
    assert (whole[-1][1::3] == -1).all(), "the last layer routes only tokens with logits"
    agreement = (np.sort(whole) == np.sort(cut)).mean()
    assert agreement > 0.99, "micro-batches may round differently, but not choose differently"
