"""A model run straight through llama.cpp's C API: what tests compare against."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import llama_cpp
import numpy as np
import numpy.typing as npt


@llama_cpp.llama_log_callback
def _discard_log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    pass


class LlamaModel:
    """A model and one context on the CPU. Errors of llama.cpp become RuntimeError."""

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int = 512,
        experts_used: int | None = None,
        n_threads: int | None = None,
        buffer_overrides: ctypes.c_void_p | None = None,
        n_seq_max: int = 1,
    ) -> None:
        """experts_used: overrides the model's number of experts per token (top-k).
        buffer_overrides: llama_model_params.tensor_buft_overrides; weights then go into anonymous memory.
        n_seq_max: sequences; several share one KV cache, as a speculator needs it.
        """
        llama_cpp.llama_log_set(_discard_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.path = path
        self._context: Any = None
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        if experts_used is not None:
            # The override keeps living in this object: llama.cpp reads it while loading only.
            self._overrides = _expert_override(_architecture(path), experts_used)
            parameters.kv_overrides = self._overrides
        if buffer_overrides is not None:
            parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
            parameters.tensor_buft_overrides = buffer_overrides
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self._n_threads = n_threads or len(os.sched_getaffinity(0))
        self._context = self._create_context(n_ctx, n_seq_max)
        if not self._context:
            self.close()
            raise RuntimeError(f"llama.cpp cannot make a context for {path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._context:
            llama_cpp.llama_free(self._context)
        if self._model:
            llama_cpp.llama_model_free(self._model)
        self._context = self._model = None

    def _create_context(self, n_ctx: int, n_seq_max: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.n_threads = params.n_threads_batch = self._n_threads
        params.n_seq_max = n_seq_max
        params.kv_unified = n_seq_max > 1
        return llama_cpp.llama_init_from_model(self._model, params)

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        encoded = text.encode()
        tokens = (llama_cpp.llama_token * (len(encoded) + 8))()
        n = llama_cpp.llama_tokenize(
            self.vocab, encoded, len(encoded), tokens, len(tokens), True, parse_special
        )
        if n < 0:
            raise RuntimeError(f"llama.cpp cannot tokenize {text!r}")
        return list(tokens[:n])

    def detokenize(self, tokens: list[int]) -> str:
        ids = (llama_cpp.llama_token * len(tokens))(*tokens)
        text = ctypes.create_string_buffer(64 * len(tokens) + 64)
        n = llama_cpp.llama_detokenize(self.vocab, ids, len(tokens), text, len(text), False, False)
        return text.raw[:n].decode(errors="replace")

    def chat_prompt(self, *messages: tuple[str, str]) -> str:
        """The prompt for (role, content) messages by llama.cpp's built-in form of the model's template."""
        template = llama_cpp.llama_model_chat_template(self._model, None)
        if not template:
            raise RuntimeError(f"{self.path} has no chat template")
        chat = (llama_cpp.llama_chat_message * len(messages))(
            *(llama_cpp.llama_chat_message(role.encode(), content.encode()) for role, content in messages)
        )
        text = ctypes.create_string_buffer(65536)
        n = llama_cpp.llama_chat_apply_template(template, chat, len(messages), True, text, len(text))
        if n < 0:
            raise RuntimeError(f"llama.cpp cannot apply the chat template of {self.path}")
        return text.raw[:n].decode()

    def metadata(self, key: str) -> str | None:
        text = ctypes.create_string_buffer(65536)
        n = llama_cpp.llama_model_meta_val_str(self._model, key.encode(), text, len(text))
        return text.value.decode() if n >= 0 else None

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Next-token logits [len(tokens), n_vocab], evaluated in one batch from an empty KV cache."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        return self.decode(tokens, position=0)

    def decode(self, tokens: list[int], *, position: int) -> npt.NDArray[np.float32]:
        """Next-token logits [len(tokens), n_vocab] of tokens appended to sequence 0 at `position`."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i] = token
                batch.pos[i] = position + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = True
            status = llama_cpp.llama_decode(self._context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        rows = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(rows, shape=(len(tokens), self.n_vocab)).copy()

    def generate(
        self, prompt: str, max_tokens: int, *, seed: int = 0, temperature: float = 0.0, top_p: float = 1.0
    ) -> str:
        """Text after `prompt` up to an end-of-generation token: greedy at temperature 0, else sampled."""
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if temperature == 0:
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        else:
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_p(top_p, 1))
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(seed))
        prompt_tokens = self.tokenize(prompt, parse_special=True)
        generated: list[int] = []
        try:
            self.logits(prompt_tokens)
            while len(generated) < max_tokens:
                token = llama_cpp.llama_sampler_sample(chain, self._context, -1)
                if llama_cpp.llama_vocab_is_eog(self.vocab, token):
                    break
                generated.append(token)
                self.decode([token], position=len(prompt_tokens) + len(generated) - 1)
        finally:
            llama_cpp.llama_sampler_free(chain)
        return self.detokenize(generated)


def _architecture(path: Path) -> str:
    """The architecture of a GGUF, which files of this project's tests state in their first key."""
    with path.open("rb") as file:
        head = file.read(4096)
    key = b"general.architecture"
    if not head.startswith(b"GGUF") or key not in head:
        raise RuntimeError(f"{path} does not start as a GGUF")
    value = head.index(key) + len(key) + 4
    length = int.from_bytes(head[value : value + 8], "little")
    return head[value + 8 : value + 8 + length].decode()


def _expert_override(architecture: str, experts_used: int) -> Any:
    overrides = (llama_cpp.llama_model_kv_override * 2)()
    overrides[0].tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT
    overrides[0].key = f"{architecture}.expert_used_count".encode()
    overrides[0].value.val_i64 = experts_used
    return overrides
