"""llama.cpp's log, whose callback outlives the object that asked for it."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from s2moe.engine.native_log import GGML_LOG_LEVEL_ERROR, NativeLog

Callback = Callable[[int, bytes, Any], None]


class FakeLlamaCpp:
    """Holds what llama.cpp would hold: the address of a callback, no reference."""

    def llama_log_callback(self, function: Callback) -> Callback:
        def callback(level: int, text: bytes, data: Any) -> None:
            function(level, text, data)

        return callback

    def llama_log_set(self, callback: Callback, _data: Any) -> None:
        self.callback = weakref.ref(callback)


def test_callback_lives_on_when_the_log_is_gone() -> None:
    llama_cpp = FakeLlamaCpp()
    NativeLog(llama_cpp)
    gc.collect()
    callback = llama_cpp.callback()
    assert callback is not None
    callback(GGML_LOG_LEVEL_ERROR, b"late\n", None)


def test_oldest_error_explains() -> None:
    llama_cpp = FakeLlamaCpp()
    log = NativeLog(llama_cpp)
    assert log.explain("nothing known") == "nothing known"
    callback = llama_cpp.callback()
    assert callback is not None
    for text in (b"cause\n", b"consequence\n"):
        callback(GGML_LOG_LEVEL_ERROR, text, None)
    assert log.explain("nothing known") == "cause"


@pytest.mark.parametrize(
    "line",
    [
        b"failed to parse grammar\n",
        b"grammar does not contain a 'root' symbol\n",
        b"unsupported grammar, left recursion detected for nonterminal at index 3\n",
        b"graph_compute: ggml_backend_sched_graph_compute_async failed with error 1\n",
    ],
)
def test_what_clients_cause_is_no_error(line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    llama_cpp = FakeLlamaCpp()
    log = NativeLog(llama_cpp)
    callback = llama_cpp.callback()
    assert callback is not None
    with caplog.at_level(logging.DEBUG):
        callback(GGML_LOG_LEVEL_ERROR, line, None)
        callback(GGML_LOG_LEVEL_ERROR, b"the drive is gone\n", None)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.ERROR]
    assert log.explain("nothing known") == "the drive is gone"


@pytest.mark.parametrize(("needs_gpu", "level"), [(False, logging.DEBUG), (True, logging.ERROR)])
def test_lack_of_a_gpu_is_an_error_only_where_one_was_asked_for(
    needs_gpu: bool, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    llama_cpp = FakeLlamaCpp()
    log = NativeLog(llama_cpp, needs_gpu=needs_gpu)
    callback = llama_cpp.callback()
    assert callback is not None
    line = b"ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected\n"
    with caplog.at_level(logging.DEBUG):
        callback(GGML_LOG_LEVEL_ERROR, line, None)
    assert [record.levelno for record in caplog.records] == [level]
    assert ("CUDA" in log.explain("nothing known")) == needs_gpu


@pytest.mark.parametrize(
    ("line", "ran_out"),
    [
        (b"alloc_buffer: allocating 9000.00 MiB on device 1: cudaMalloc failed: out of memory\n", True),
        (b"llama_model_load: error loading model: unable to allocate CUDA0 buffer\n", True),
        (b"ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 314572800\n", True),
        (b"failed to initialize the context: failed to allocate buffer for kv cache\n", True),
        (b"llama_model_load: error loading model: mmap failed: Cannot allocate memory\n", True),
        (b"llama_model_load: error loading model: missing tensor 'output_norm.weight'\n", False),
        (b"llama_model_load: error loading model: unknown model architecture: 'x'\n", False),
    ],
)
def test_lack_of_memory_is_told_from_other_failures(line: bytes, ran_out: bool) -> None:
    llama_cpp = FakeLlamaCpp()
    log = NativeLog(llama_cpp)
    assert not log.ran_out_of_memory
    callback = llama_cpp.callback()
    assert callback is not None
    callback(GGML_LOG_LEVEL_ERROR, line, None)
    callback(GGML_LOG_LEVEL_ERROR, b"llama_model_load_from_file_impl: failed to load model\n", None)
    assert log.ran_out_of_memory == ran_out
