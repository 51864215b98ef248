"""The loaded model: weights, context, vocabulary, and what the KV cache holds."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from s2moe.engine.cache_directory import cache_directory
from s2moe.engine.contexts import meta_value
from s2moe.engine.cpu import default_thread_count, processor_name
from s2moe.engine.default_sampling import default_sampling
from s2moe.engine.device import choose_device
from s2moe.engine.embedding import Embedder
from s2moe.engine.errors import EngineStartError, RequestAbortedError, RequestError
from s2moe.engine.evaluated_tokens import EvaluatedTokens, token_array
from s2moe.engine.expert_trace import ExpertTraceFile
from s2moe.engine.fault_log import FaultLog
from s2moe.engine.hot_experts import ModelIdentity
from s2moe.engine.loading import Loader
from s2moe.engine.memory import Footprint, measure_footprint, resident_bytes
from s2moe.engine.memory_guard import MemoryGuard
from s2moe.engine.messages import Configure, MemoryPool, ModelInfo, Plan
from s2moe.engine.model_file import check_file
from s2moe.engine.native import (
    AbortSwitch,
    ChatTemplate,
    Library,
    NativeError,
    Sampler,
    Status,
    load_llama_cpp,
)
from s2moe.engine.native_experts import model_layout
from s2moe.engine.native_log import NativeLog
from s2moe.engine.native_speculation import Speculator
from s2moe.engine.prompt_cache import NOT_CUTTABLE, PREFIX_CHANGED, PromptCache
from s2moe.engine.prompt_cache_setup import create_prompt_cache
from s2moe.engine.sequence_state import SequenceState
from s2moe.engine.speculation_state import Circumstances, SpeculationState
from s2moe.engine.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_DECODE_FAILURES = {
    Status.NO_MEMORY: "insufficient_memory",
    Status.IO: "model_file_error",
    Status.NUMERIC: "numeric_error",
}
"""Codes of RequestError."""


class Model:
    """One model with one conversation. Used by one thread, but for `abort`.

    `kv_tokens` are exactly the tokens at positions 0 … n−1 of the KV cache, whatever happened before.
    """

    def __init__(
        self,
        configure: Configure,
        on_progress: Callable[[str, float], None],
        on_plan: Callable[[Plan], None] | None = None,
    ) -> None:
        """Loads everything. `on_progress(phase, fraction)` is called on this thread, and before anything is
        loaded `on_plan`, once.

        Raises EngineStartError when the configuration cannot work.
        """
        on_progress("library", 0.0)
        self.llama_cpp: Any = load_llama_cpp()
        self.library = Library()
        # before llama.cpp looks for GPUs itself
        self.device = choose_device(configure, self.library.build_info())
        self._log = NativeLog(self.llama_cpp, needs_gpu=bool(self.device.gpus))
        self.llama_cpp.llama_backend_init()
        self.n_threads = configure.n_threads or default_thread_count()
        self._check_gpus()
        check_file(Path(configure.model_path))
        on_progress("library", 1.0)

        self._front_end_bytes = configure.front_end_bytes
        logger.info("%s", self.device.describe())
        loader = Loader(
            self.llama_cpp,
            self.library,
            self._log,
            configure,
            self.n_threads,
            self._planned_footprint,
            self.device,
        )
        self._loaded = loader.load(on_progress, on_plan)
        self.handle, self.context = self._loaded.handle, self._loaded.contexts.main
        self.experts, self.plan = self._loaded.experts, self._loaded.plan
        gpu_plan = self._loaded.gpu_plan
        self.gpu_line = "" if gpu_plan is None else gpu_plan.line()
        """What slots on a GPU get; empty: there are none."""
        self.speculation = self._loaded.speculation
        """What requests may ask for."""
        self.vocab = self.llama_cpp.llama_model_get_vocab(self.handle)
        self.vocabulary = Vocabulary(self.llama_cpp, self.handle)
        self.memory = self.llama_cpp.llama_get_memory(self.context)
        self.abort = AbortSwitch(self.library, self.context, self._loaded.contexts.draft)
        self._embedder = self._create_embedder()
        self._chat_template = None if self._embedder is not None else self._create_template(configure)
        self.n_ctx: int = self.llama_cpp.llama_n_ctx(self.context)
        self.n_batch: int = self.llama_cpp.llama_n_ubatch(self.context)
        self.kv_tokens: list[int] = []
        self._n_exact = 0
        """Leading tokens whose keys and values gating had no part in."""
        self._faults = FaultLog(configure.model_path)
        self._sequence = SequenceState(self.llama_cpp, self.handle, self.context)
        self.prompt_cache = self._create_prompt_cache(configure)
        self.guard = self._create_guard()
        self._trace = self._create_trace(configure)
        on_progress("warmup", 0.0)
        self._warm_up()
        on_progress("warmup", 1.0)
        self._learnt = self._open_learnt(configure) if self.speculation.is_possible else None
        self.speculator = self._create_speculator() if self.speculation.is_possible else None
        """None: the model cannot be drafted for, or the server is not to speculate."""
        logger.info("%s", self.speculation.describe())
        self.info = self._describe(configure)

    # loading

    def _check_gpus(self) -> None:
        """llama.cpp would load the model into the machine's memory without a word."""
        if self.device.gpus and not self.llama_cpp.llama_supports_gpu_offload():
            raise EngineStartError(
                "device_unavailable",
                "--device cuda, but llama.cpp cannot use the GPU that the driver shows: "
                f"{self._log.explain('it gave no reason')}; run nvidia-smi to see whether it works, or use "
                "--device cpu",
            )

    def _create_template(self, configure: Configure) -> ChatTemplate:
        try:
            return ChatTemplate(self.library, self.handle, configure.chat_template)
        except NativeError as error:
            raise EngineStartError(
                "template_invalid",
                f"the chat template does not parse: {error.message}; pass another with --chat-template-file",
            ) from error

    def _create_guard(self) -> MemoryGuard | None:
        if self.experts is None or self.plan is None:
            return None
        return MemoryGuard(
            self.experts,
            self.plan.budget.n_bytes,
            lambda: self.measure_footprint().total_bytes,
            self.prompt_cache,
        )

    def _create_embedder(self) -> Embedder | None:
        if not self._loaded.gives_embeddings:
            return None
        return Embedder(self.llama_cpp, self.handle, self.context, self.vocabulary)

    def _create_prompt_cache(self, configure: Configure) -> PromptCache:
        if self._embedder is not None:
            return PromptCache(self._sequence, 0)
        params = self.llama_cpp.llama_context_default_params()
        return create_prompt_cache(
            *(configure, self._sequence, self.plan),
            layout=lambda: model_layout(self.library, configure.model_path),
            llama_build=self.library.build_info()["source"],
            kv_types=f"{params.type_k} {params.type_v}",
            hardware=f"{self.device.names}, {processor_name()}",
            meta=partial(meta_value, self.llama_cpp, self.handle),
        )

    def _create_trace(self, configure: Configure) -> ExpertTraceFile | None:
        if configure.expert_trace_path is None:
            return None
        if self.experts is None:
            raise EngineStartError(
                "trace_unavailable",
                f"--expert-trace: {configure.model_path} is served without an expert cache; omit the option",
            )
        return ExpertTraceFile(Path(configure.expert_trace_path), self.experts)

    def _open_learnt(self, configure: Configure) -> SpeculationState | None:
        if not configure.keep_expert_counts:
            return None
        if self.experts is None:
            layout, reads = model_layout(self.library, configure.model_path), "nothing"
        else:
            layout, reader = self.experts.layout, self.experts.reader()
            reads = f"{reader['reader']} {reader['io']}"
            if configure.expert_policy != "cache":
                reads += f", {configure.expert_policy}"
        circumstances = Circumstances.of(
            ModelIdentity.of_layout(layout),
            f"{self.device.names}, {processor_name()}, {self.n_threads} threads, reads with {reads}",
            self._resident_share,
        )
        try:
            return SpeculationState(circumstances, cache_directory())
        except RuntimeError as error:
            logger.warning("what speculation learns is not kept, for want of a cache directory: %s", error)
            return None

    @property
    def _resident_share(self) -> float:
        """Experts that fit the memory that computes them, 0 … 1."""
        if self._loaded.gpu_plan is not None:
            return self._loaded.gpu_plan.n_slots / max(1, self._loaded.gpu_plan.n_experts)
        return 1.0 if self.plan is None else self.plan.resident_share

    def _create_speculator(self) -> Speculator:
        state = None if self._learnt is None else self._learnt.load()
        try:
            speculator = Speculator(
                self.library, self.context, draft_context=self._loaded.contexts.draft, state=state
            )
        except NativeError as error:
            raise EngineStartError(
                "speculation_failed",
                f"speculation cannot be prepared: {error.message}; serve with --speculation off",
            ) from error
        restored = speculator.state()  # begin() adds the settings of the start
        try:
            speculator.begin(self.speculation.options)
        except NativeError as error:
            flag = "--" + error.message.partition(" ")[0].replace("_", "-").replace("method", "speculation")
            speculator.close()
            raise EngineStartError(
                "invalid_setting", f"{flag}: {error.message}; change or omit it"
            ) from error
        if self._learnt is not None:
            self._learnt.begin(restored, speculator.state())
        report = speculator.report()
        self.speculation = replace(self.speculation, preset=report["preset"])
        if not report["width"]:
            limit = "drafts are chains: without flash attention rows of a tree would be rounded otherwise"
            self.speculation = replace(self.speculation, limit=limit)
        return speculator

    def measure_footprint(self) -> Footprint:
        """Of the engine, and of the front end where that counts."""
        return measure_footprint(self._front_end_bytes)

    def _planned_footprint(self) -> Footprint:
        """With the front end as of the first start: the reserve pays for what it has grown by since, and an
        engine that restarts must not refuse the budget for that."""
        return Footprint(self._front_end_bytes, resident_bytes())

    def _warm_up(self) -> None:
        """One token through the graph, so that the first request does not pay for page faults and buffers."""
        token = max(0, self.llama_cpp.llama_vocab_bos(self.vocab))
        try:
            if self._embedder is not None:
                self._embedder.embed([], [[token]])
                return
            self.decode([token])
        except (RequestError, RequestAbortedError) as error:
            raise EngineStartError("warmup_failed", f"the first decode failed: {error}") from error
        self.forget()

    def _describe(self, configure: Configure) -> ModelInfo:
        buffer = ctypes.create_string_buffer(512)
        self.llama_cpp.llama_model_desc(self.handle, buffer, len(buffer))
        moe = self.library.moe_info(self.handle)
        return ModelInfo(
            architecture=meta_value(self.llama_cpp, self.handle, "general.architecture"),
            name=meta_value(self.llama_cpp, self.handle, "general.name") or Path(configure.model_path).stem,
            quantization=buffer.value.decode(errors="replace").rpartition(" ")[2],
            size_bytes=self.llama_cpp.llama_model_size(self.handle),
            n_params=self.llama_cpp.llama_model_n_params(self.handle),
            n_ctx=self.n_ctx if self._embedder is None else self._embedder.n_max_tokens,
            n_ctx_train=self.llama_cpp.llama_model_n_ctx_train(self.handle),
            n_layer=moe.n_layer,
            n_vocab=self.vocabulary.n_tokens,
            n_expert=moe.n_expert,
            n_expert_used=moe.n_expert_used,
            n_moe_layer=moe.n_moe_layer,
            n_threads=self.n_threads,
            device=configure.device,
            system_fingerprint=f"b{self.library.build_info()['source']}",
            longest_piece_bytes=self.vocabulary.longest_piece_bytes,
            speculation_method=self.speculation.method,
            speculation_preset=self.speculation.preset,
            speculation_limit=self.speculation.limit,
            chat_template="" if self._chat_template is None else self._chat_template.source(),
            bos_token=self.vocabulary.bos_text,
            eos_token=self.vocabulary.eos_text,
            n_embd=self.llama_cpp.llama_model_n_embd_out(self.handle),
            gives_embeddings=self._embedder is not None,
            default_sampling=default_sampling(partial(meta_value, self.llama_cpp, self.handle)),
            devices=self.device.to_wire(),
        )

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises RequestError for a model that generates nothing."""
        self._check_generates()
        assert self._chat_template is not None
        return self._chat_template

    # vocabulary

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a prompt: special tokens are parsed, BOS is added unless the text has it."""
        return self.vocabulary.tokenize_prompt(text)

    def is_end(self, token: int) -> bool:
        """Whether a token ends the model's turn."""
        return self.vocabulary.is_end(token)

    # KV cache

    def reuse_prefix(self, prompt: list[int], *, exact: bool) -> int:
        """Keeps of the KV cache what `prompt` begins with and drops the rest. `exact`: also drops what gating
        had a part in, since the answer must be the model's own.

        Returns the number of kept tokens, at most len(prompt) − 1: the last token must be evaluated again,
        for its logits. Raises RequestError for a model that generates nothing.
        """
        self._check_generates()
        held = EvaluatedTokens(token_array(self.kv_tokens), self._n_exact)
        exchanged = self.prompt_cache.exchange(held, prompt, exact=exact)
        if exchanged is not None:
            held = exchanged
            self.kv_tokens[:] = held.tokens
            self._n_exact = held.n_exact
        n = held.usable(token_array(prompt[:-1]), exact=exact, can_be_cut=True)
        if n == len(held):
            return n
        # recurrent states cannot be cut, and a sliding window may have lost the start of what is kept
        if n == 0 or not self._sequence.cut(n):
            self.prompt_cache.count_lost(NOT_CUTTABLE if n else PREFIX_CHANGED)
            self.forget()
            return 0
        self.prompt_cache.count_lost(PREFIX_CHANGED)
        del self.kv_tokens[n:]
        self._n_exact = min(self._n_exact, n)
        return n

    def forget(self) -> None:
        """Empties the KV cache."""
        self._sequence.clear()
        self.kv_tokens.clear()
        self._n_exact = 0

    def _check_generates(self) -> None:
        if self._embedder is not None:
            raise RequestError(
                "unsupported", "this model gives embeddings and generates no text; ask /v1/embeddings"
            )

    def decode(self, tokens: list[int]) -> None:
        """Evaluates up to n_batch tokens behind the KV cache; the logits of the last are then ready.

        Raises RequestAbortedError (the KV cache is as before) and RequestError.
        """
        begin_ns = time.monotonic_ns()
        with self._evaluating():
            self.library.decode(self.context, tokens, len(self.kv_tokens))
        self._evaluated(tokens, begin_ns, n_unbiased=len(tokens))

    def speculate(
        self,
        speculator: Speculator,
        sampler: Sampler,
        root: int,
        n_max: int,
        *,
        is_retried: bool,
        keeps_bits: bool = True,
    ) -> list[int]:
        """One step: evaluates `root` behind the KV cache and returns what follows, as Speculator.step().

        `is_retried`: whether the caller decodes plainly after an internal error, which then is not logged.
        `keeps_bits`: whether rows that gating had no part in are those of single-token decodes.

        Raises RequestAbortedError and RequestError; the KV cache and the sampler are then as before.
        """
        begin_ns = time.monotonic_ns()
        with self._evaluating(is_retried=is_retried):
            tokens = speculator.step(sampler, root, len(self.kv_tokens), n_max)
        biased = (index for index, row in enumerate(speculator.rows()) if row.n_biased > 0)
        n_unbiased = next(biased, len(tokens)) if keeps_bits else 0
        self._evaluated([root, *tokens[:-1]], begin_ns, n_unbiased=n_unbiased)
        return tokens

    @contextlib.contextmanager
    def _evaluating(self, *, is_retried: bool = False) -> Iterator[None]:
        """Around a native call, whose errors become those of a request. `is_retried`: an internal error is
        not the operator's business yet."""
        try:
            yield
        except NativeError as error:
            if self._trace is not None:
                self._trace.discard()
            if error.status == Status.ABORTED:
                raise RequestAbortedError from error
            code = _DECODE_FAILURES.get(error.status, "internal")
            if not (is_retried and code == "internal"):
                self._faults.failed(error.message)
            raise RequestError(code, f"decode failed: {error.message}") from error

    def _evaluated(self, tokens: list[int], begin_ns: int, *, n_unbiased: int) -> None:
        """`tokens` have been added to the KV cache by a native call that began at begin_ns. Gating had no
        part in the first n_unbiased."""
        if self._n_exact == len(self.kv_tokens):
            self._n_exact += n_unbiased
        self.kv_tokens += tokens
        self._faults.worked()
        if self._trace is not None:
            self._trace.add(begin_ns, len(tokens))

    def embed(self, texts: list[str], token_lists: list[list[int]]) -> tuple[list[list[float]], list[int]]:
        """Vectors of length 1 of texts and then of lists of tokens, and how many tokens each has.

        Raises RequestError and RequestAbortedError.
        """
        if self._embedder is None:
            raise RequestError("unsupported", "this model gives no embeddings; serve an embedding model")
        return self._embedder.embed(texts, token_lists)

    def keep_learnt(self) -> None:
        """Writes down now and then what speculation learnt. Not during a decode."""
        if self._learnt is not None and self.speculator is not None:
            self._learnt.save_if_due(time.monotonic(), self.speculator.state)

    def memory_pools(self) -> list[MemoryPool]:
        """The plan's pools with what they use now; what buffers cannot explain counts as the processes'."""
        if self.plan is None:
            return []
        needs = self.plan.needs
        used = {"weights": needs.weights_bytes, "kv": needs.kv_bytes, "compute": needs.compute_bytes}
        if self.experts is not None:
            used["expert_cache"] = self.experts.stats().touched_bytes
            slots = self.experts.slot_stats()
            if slots is not None and self.device.is_unified:
                used["expert_cache"] += slots.capacity_bytes
        used["prompt_cache"] = self.prompt_cache.n_bytes
        used["processes"] = max(0, self.measure_footprint().total_bytes - sum(used.values()))
        return [
            MemoryPool(pool=pool, budget_bytes=budget_bytes, used_bytes=used.get(pool, 0))
            for pool, budget_bytes in self.plan.pools.items()
        ]

    def close(self) -> None:
        self.prompt_cache.close(EvaluatedTokens(token_array(self.kv_tokens), self._n_exact))
        if self._embedder is not None:
            self._embedder.close()
        if self._chat_template is not None:
            self._chat_template.close()
        if self._trace is not None:
            self._trace.close()
        if self.speculator is not None:
            if self._learnt is not None:
                self._learnt.save(self.speculator.state())
            self.speculator.close()
        self._loaded.close()
        self.abort.close()
