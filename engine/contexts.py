"""The contexts of one model: the conversation's, and where drafts need one the drafts' own."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from s2moe.engine.embedding import N_SEQUENCES, POOLING_KEY, gives_embeddings
from s2moe.engine.errors import EngineStartError
from s2moe.engine.memory import available_bytes
from s2moe.engine.messages import Configure
from s2moe.engine.native import Library
from s2moe.engine.native_experts import ContextMemory, context_memory
from s2moe.engine.native_log import NativeLog
from s2moe.engine.native_speculation import N_DRAFT_SEQUENCES, N_VERIFY_ROWS, set_batch_invariance
from s2moe.engine.speculation import SpeculationSupport

DEFAULT_N_CTX = 8192
N_CTX_STEP = 256
"""llama.cpp rounds a context up to a multiple of it."""
DEFAULT_N_BATCH = 512
MAX_OUTPUTS = 64
"""Tokens of one decode whose logits may be asked for: more than any draft tree has. llama.cpp reserves a row
of the vocabulary's size for each."""
MAX_DRAFT_BATCH = 64
"""Tokens that a context of drafts evaluates at once. Prompts pass through it too, but its buffers cost
experts."""
GRAPH_LAYER_BYTES = 84 * 1024
"""What llama.cpp keeps of a small graph per layer of the model, beside its buffers: measured, rounded up."""
MAX_WIDE_ROWS = 15
"""Tokens of the widest verification of `expert-skip`: the root and two chains of seven drafts. Those near
the end of an answer are narrower."""


def kept_widths(*, has_draft_context: bool) -> list[int]:
    """Tokens of each graph that a speculator keeps: one for drafts, one for a token without the gate, and one
    for each number of tokens that it verifies at once."""
    widths: list[int] = [1, 1, *range(1, N_VERIFY_ROWS + 1)]
    if has_draft_context:  # drafts there, and what else expert-skip verifies at once
        widths += [1, *range(N_VERIFY_ROWS + 1, MAX_WIDE_ROWS + 1)]
    return widths


def small_graphs_bytes(n_layer: int, n_vocab: int, *, has_draft_context: bool) -> int:
    """What a speculator adds to its context: its graphs, whose buffers are little more than a row of logits
    per token."""
    widths = kept_widths(has_draft_context=has_draft_context)
    return len(widths) * GRAPH_LAYER_BYTES * n_layer + sum(widths) * 4 * n_vocab


@dataclass
class Contexts:
    """Handles of llama.h."""

    llama_cpp: Any
    main: Any
    draft: Any = None
    """None: drafts are made in the main context."""

    def free(self) -> None:
        """Before the model."""
        if self.draft is not None:
            self.llama_cpp.llama_free(self.draft)
        self.llama_cpp.llama_free(self.main)


class ContextMaker:
    """Creates contexts for one configuration, simulated and real ones alike. Used by one thread."""

    def __init__(
        self, llama_cpp: Any, library: Library, log: NativeLog, configure: Configure, n_threads: int
    ) -> None:
        self._llama_cpp = llama_cpp
        self._library = library
        self._log = log
        self._configure = configure
        self._n_threads = n_threads
        self._support: SpeculationSupport | None = None
        self._gives_embeddings: bool | None = None

    @property
    def n_batch(self) -> int:
        """Tokens of the largest micro-batch."""
        return self._configure.n_batch or DEFAULT_N_BATCH

    def n_ctx(self, handle: Any) -> int:
        n_ctx_train: int = self._llama_cpp.llama_model_n_ctx_train(handle)
        asked = self._configure.n_ctx or min(n_ctx_train, DEFAULT_N_CTX)
        return -(-asked // N_CTX_STEP) * N_CTX_STEP

    def speculation(self, handle: Any) -> SpeculationSupport:
        """What the model, loaded or simulated, allows."""
        if self.gives_embeddings(handle):
            return SpeculationSupport(
                self._configure.speculation, is_possible=False, limit="the model gives embeddings, not text"
            )
        if self._support is None:
            n_batch = min(self.n_batch, self.n_ctx(handle))
            self._support = SpeculationSupport.of_model(
                self._library, handle, self._configure.speculation, n_batch
            )
            if self._support.is_possible:
                # before the first context: verified rows must equal those of single tokens, bit for bit
                set_batch_invariance(self._library, N_VERIFY_ROWS)
        return self._support

    def gives_embeddings(self, handle: Any) -> bool:
        """Whether the model, loaded or simulated, is one for embeddings. Raises EngineStartError for one that
        is neither for these nor for text."""
        if self._gives_embeddings is None:
            architecture = meta_value(self._llama_cpp, handle, "general.architecture")
            pooling_type = meta_value(self._llama_cpp, handle, f"{architecture}.{POOLING_KEY}")
            self._gives_embeddings = gives_embeddings(pooling_type, self._configure.model_path)
        return self._gives_embeddings

    def n_kv_caches(self, handle: Any) -> int:
        return 2 if self.speculation(handle).has_draft_context else 1

    def create(self, handle: Any, n_batch: int) -> Contexts:
        """Raises EngineStartError; nothing stays allocated then."""
        self._check_kv_size(handle)
        contexts = Contexts(self._llama_cpp, self._create_one(handle, n_batch))
        if self.speculation(handle).has_draft_context:
            try:
                contexts.draft = self._create_one(handle, min(n_batch, MAX_DRAFT_BATCH))
            except EngineStartError:
                contexts.free()
                raise
        return contexts

    def memory(self, handle: Any, contexts: Contexts) -> ContextMemory:
        """What the contexts and their model take, with what a speculator will add."""
        memory = context_memory(self._library, contexts.main)
        if contexts.draft is not None:
            draft = context_memory(self._library, contexts.draft)
            memory.kv_bytes += draft.kv_bytes
            memory.compute_bytes += draft.compute_bytes
            memory.gpu_kv_bytes += draft.gpu_kv_bytes
            memory.gpu_compute_bytes += draft.gpu_compute_bytes
        vocab = self._llama_cpp.llama_model_get_vocab(handle)
        n_vocab: int = self._llama_cpp.llama_vocab_n_tokens(vocab)
        if self.gives_embeddings(handle):
            # pooling needs every token, and llama.cpp then sets a row of logits aside for each
            n_embd: int = self._llama_cpp.llama_model_n_embd_out(handle)
            memory.compute_bytes += 4 * (n_vocab + n_embd) * self._llama_cpp.llama_n_ubatch(contexts.main)
        if self.speculation(handle).is_possible:
            n_layer: int = self._llama_cpp.llama_model_n_layer(handle)
            small_bytes = small_graphs_bytes(n_layer, n_vocab, has_draft_context=contexts.draft is not None)
            if memory.gpu_compute_bytes:
                memory.gpu_compute_bytes += small_bytes
            else:
                memory.compute_bytes += small_bytes
        return memory

    def _create_one(self, handle: Any, n_batch: int) -> Any:
        params = self._llama_cpp.llama_context_default_params()
        params.n_ctx = self.n_ctx(handle)
        # one micro-batch per native call: an aborted call then leaves the KV cache as it was
        params.n_batch = params.n_ubatch = min(n_batch, params.n_ctx)
        params.n_outputs_max = min(MAX_OUTPUTS, params.n_batch)
        if self.gives_embeddings(handle):
            params.embeddings = True
            params.n_outputs_max = params.n_batch
            # llama.cpp reserves a graph for equally long sequences
            params.n_seq_max = next(n for n in range(N_SEQUENCES, 0, -1) if params.n_ubatch % n == 0)
            params.kv_unified = True
        params.n_threads = params.n_threads_batch = self._n_threads
        params.no_perf = True
        if self.speculation(handle).is_possible:
            params.n_seq_max = N_DRAFT_SEQUENCES
            params.kv_unified = True
        context = self._llama_cpp.llama_init_from_model(handle, params)
        if not context:
            reason = self._log.explain("not enough memory")
            raise EngineStartError(
                "context_failed",
                f"cannot create a context of {params.n_ctx} tokens: {reason}; try a smaller --ctx-size",
            )
        return context

    def _check_kv_size(self, handle: Any) -> None:
        """Refuses what the kernel would only notice when it is too late: it hands out memory that it does not
        have and kills whoever touches it."""
        llama_cpp = self._llama_cpp
        architecture = meta_value(llama_cpp, handle, "general.architecture")
        if meta_value(llama_cpp, handle, f"{architecture}.attention.kv_lora_rank"):
            return  # a compressed cache, many times smaller than this formula says
        n_head: int = llama_cpp.llama_model_n_head(handle)
        n_embd: int = llama_cpp.llama_model_n_embd(handle)
        n_head_kv: int = llama_cpp.llama_model_n_head_kv(handle)
        n_layer: int = llama_cpp.llama_model_n_layer(handle)
        if n_head == 0:
            return
        # keys and values of two bytes per layer and token
        n_ctx = self.n_ctx(handle)
        n_caches = self.n_kv_caches(handle)
        kv_bytes = n_caches * 2 * 2 * n_layer * n_head_kv * (n_embd // n_head) * n_ctx
        available = available_bytes()
        if kv_bytes > available:
            caches = "its KV cache" if n_caches == 1 else "its KV cache and that of the drafts"
            raise EngineStartError(
                "context_failed",
                f"a context of {n_ctx} tokens needs {kv_bytes / 2**30:.1f} GiB for {caches}, but only "
                f"{available / 2**30:.1f} GiB of memory are available; choose a smaller --ctx-size",
            )


def expert_width(llama_cpp: Any, handle: Any) -> int:
    """The n_ff of an expert: values between its matrices. 0 where the model does not say it as one number."""
    architecture = meta_value(llama_cpp, handle, "general.architecture")
    for key in ("expert_feed_forward_length", "feed_forward_length"):
        value = meta_value(llama_cpp, handle, f"{architecture}.{key}")
        if value.isdecimal():
            return int(value)
    return 0


def meta_value(llama_cpp: Any, handle: Any, key: str) -> str:
    """A value of the model's metadata as text, "" if there is none."""
    buffer = ctypes.create_string_buffer(512)
    length = llama_cpp.llama_model_meta_val_str(handle, key.encode(), buffer, len(buffer))
    return buffer.value.decode(errors="replace") if length > 0 else ""
