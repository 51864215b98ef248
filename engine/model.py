"""The loaded model: weights, context, vocabulary, and what the KV cache holds."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s2moe.engine.cpu import default_thread_count
from s2moe.engine.errors import EngineStartError, RequestAbortedError, RequestError
from s2moe.engine.memory import available_bytes
from s2moe.engine.messages import Configure, ModelInfo
from s2moe.engine.native import (
    AbortSwitch,
    ChatTemplate,
    Library,
    NativeError,
    Status,
    load_llama_cpp,
)

logger = logging.getLogger(__name__)

DEFAULT_N_CTX = 8192
GGUF_MAGIC = b"GGUF"

GGML_LOG_LEVEL_ERROR = 4
_LOG_LEVELS = {3: logging.WARNING, GGML_LOG_LEVEL_ERROR: logging.ERROR}
"""ggml_log_level → ours; the rest of llama.cpp's chatter is for debugging."""
_EXPECTED_WARNINGS = (
    "removing memory module entries",
    "failed to decode, ret = 2",
    "failed with error 1",
    "compute status: 1",
)
"""What llama.cpp warns of when a decode is aborted, which is an ordinary event here."""


class NativeLog:
    """Routes llama.cpp's log into ours and remembers its last errors, which explain a failed load."""

    def __init__(self, llama_cpp: Any) -> None:
        self.errors: deque[str] = deque(maxlen=5)
        self._lock = threading.Lock()
        self._callback = llama_cpp.llama_log_callback(self._receive)
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _receive(self, level: int, text: bytes, _user_data: Any) -> None:
        line = text.decode(errors="replace").strip()
        if not line:
            return
        if level == GGML_LOG_LEVEL_ERROR:
            with self._lock:
                self.errors.append(line)
        expected = any(warning in line for warning in _EXPECTED_WARNINGS)
        logger.log(logging.DEBUG if expected else _LOG_LEVELS.get(level, logging.DEBUG), "%s", line)

    def explain(self, default: str) -> str:
        """The oldest remembered error, which is usually the cause; later ones only report the failure."""
        with self._lock:
            return self.errors[0] if self.errors else default


class Model:
    """One model with one context and one sequence. Used by one thread, but for `abort`.

    `kv_tokens` are exactly the tokens at positions 0 … n−1 of the KV cache, whatever happened before.
    """

    def __init__(self, configure: Configure, on_progress: Callable[[str, float], None]) -> None:
        """Loads everything. `on_progress(phase, fraction)` is called on this thread.

        Raises EngineStartError when the configuration cannot work.
        """
        on_progress("library", 0.0)
        self.llama_cpp: Any = load_llama_cpp()
        self.library = Library()
        self._log = NativeLog(self.llama_cpp)
        self.llama_cpp.llama_backend_init()
        self.n_threads = configure.n_threads or default_thread_count()
        self._check_device(configure)
        self._check_file(Path(configure.model_path))
        on_progress("library", 1.0)

        self.handle = self._load_weights(configure, on_progress)
        self.vocab = self.llama_cpp.llama_model_get_vocab(self.handle)
        on_progress("context", 0.0)
        self.context = self._create_context(configure)
        self.memory = self.llama_cpp.llama_get_memory(self.context)
        self.abort = AbortSwitch(self.library, self.context)
        self.chat_template = self._create_template(configure)
        self.n_ctx: int = self.llama_cpp.llama_n_ctx(self.context)
        self.n_batch: int = self.llama_cpp.llama_n_ubatch(self.context)
        self.kv_tokens: list[int] = []
        self._pieces: dict[int, bytes] = {}
        self._special_pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}
        self._longest_piece_bytes = 0
        on_progress("context", 1.0)
        on_progress("warmup", 0.0)
        self._warm_up()
        on_progress("warmup", 1.0)
        self.info = self._describe(configure)

    # loading

    def _check_device(self, configure: Configure) -> None:
        if configure.device == "cpu":
            return
        if configure.device != "cuda":
            raise EngineStartError(
                "invalid_device", f"--device {configure.device} is unknown; use cpu or cuda"
            )
        if not self.library.build_info()["cuda"]:
            raise EngineStartError(
                "device_unavailable",
                "--device cuda, but this build has no CUDA; rebuild with `make setup CUDA=1` "
                "or use --device cpu",
            )
        if not self.llama_cpp.llama_supports_gpu_offload():
            raise EngineStartError(
                "device_unavailable",
                "--device cuda, but no CUDA device answers; check the driver with nvidia-smi, and in a "
                "container pass --gpus all (Jetson: --runtime nvidia)",
            )

    def _check_file(self, path: Path) -> None:
        """The plain mistakes, so that they get a plain message."""
        try:
            with path.open("rb") as file:
                magic = file.read(len(GGUF_MAGIC))
        except FileNotFoundError:
            raise EngineStartError("model_not_found", f"model {path} does not exist; check --model") from None
        except OSError as error:
            raise EngineStartError(
                "model_unreadable", f"model {path} cannot be read: {error.strerror}; check --model"
            ) from None
        if magic != GGUF_MAGIC:
            raise EngineStartError(
                "model_invalid",
                f"model {path} is not a GGUF file; convert it with llama.cpp or pick another file",
            )

    def _load_weights(self, configure: Configure, on_progress: Callable[[str, float], None]) -> Any:
        params = self.llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 999 if configure.device == "cuda" else 0

        def report(fraction: float, _user_data: Any) -> bool:
            on_progress("model", fraction)
            return True

        callback = self.llama_cpp.llama_progress_callback(report)
        params.progress_callback = callback
        handle = self.llama_cpp.llama_model_load_from_file(configure.model_path.encode(), params)
        if not handle:
            reason = self._log.explain("llama.cpp gave no reason")
            raise EngineStartError(
                "model_invalid",
                f"cannot load {configure.model_path}: {reason}; the file may be damaged, of an unknown "
                "architecture, or larger than the memory",
            )
        return handle

    def _create_context(self, configure: Configure) -> Any:
        n_ctx_train: int = self.llama_cpp.llama_model_n_ctx_train(self.handle)
        params = self.llama_cpp.llama_context_default_params()
        params.n_ctx = configure.n_ctx or min(n_ctx_train, DEFAULT_N_CTX)
        self._check_kv_size(params.n_ctx)
        # one micro-batch per native call: an aborted call then leaves the KV cache as it was
        params.n_batch = params.n_ubatch = min(configure.n_batch, params.n_ctx)
        params.n_threads = params.n_threads_batch = self.n_threads
        params.no_perf = True
        context = self.llama_cpp.llama_init_from_model(self.handle, params)
        if not context:
            reason = self._log.explain("not enough memory")
            raise EngineStartError(
                "context_failed",
                f"cannot create a context of {params.n_ctx} tokens: {reason}; try a smaller --ctx-size",
            )
        return context

    def _check_kv_size(self, n_ctx: int) -> None:
        """Refuses what the kernel would only notice when it is too late: it hands out memory that it does not
        have and kills whoever touches it."""
        if self._meta(f"{self._meta('general.architecture')}.attention.kv_lora_rank"):
            return  # a compressed cache, many times smaller than this formula says
        n_head: int = self.llama_cpp.llama_model_n_head(self.handle)
        n_embd: int = self.llama_cpp.llama_model_n_embd(self.handle)
        n_head_kv: int = self.llama_cpp.llama_model_n_head_kv(self.handle)
        n_layer: int = self.llama_cpp.llama_model_n_layer(self.handle)
        if n_head == 0:
            return
        # keys and values of two bytes per layer and token
        kv_bytes = 2 * 2 * n_layer * n_head_kv * (n_embd // n_head) * n_ctx
        available = available_bytes()
        if kv_bytes > available:
            raise EngineStartError(
                "context_failed",
                f"a context of {n_ctx} tokens needs {kv_bytes / 2**30:.1f} GiB for its KV cache, but only "
                f"{available / 2**30:.1f} GiB of memory are available; choose a smaller --ctx-size",
            )

    def _create_template(self, configure: Configure) -> ChatTemplate:
        try:
            return ChatTemplate(self.library, self.handle, configure.chat_template)
        except NativeError as error:
            raise EngineStartError(
                "template_invalid",
                f"the chat template does not parse: {error.message}; pass another with --chat-template-file",
            ) from error

    def _warm_up(self) -> None:
        """One token through the graph, so that the first request does not pay for page faults and buffers."""
        token: int = self.llama_cpp.llama_vocab_bos(self.vocab)
        try:
            self.decode([max(token, 0)])
        except (RequestError, RequestAbortedError) as error:
            raise EngineStartError("warmup_failed", f"the first decode failed: {error}") from error
        self.forget()

    def _meta(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(512)
        length = self.llama_cpp.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if length > 0 else ""

    def _describe(self, configure: Configure) -> ModelInfo:
        buffer = ctypes.create_string_buffer(512)
        self.llama_cpp.llama_model_desc(self.handle, buffer, len(buffer))
        moe = self.library.moe_info(self.handle)
        return ModelInfo(
            architecture=self._meta("general.architecture"),
            name=self._meta("general.name") or Path(configure.model_path).stem,
            quantization=buffer.value.decode(errors="replace").rpartition(" ")[2],
            size_bytes=self.llama_cpp.llama_model_size(self.handle),
            n_params=self.llama_cpp.llama_model_n_params(self.handle),
            n_ctx=self.n_ctx,
            n_ctx_train=self.llama_cpp.llama_model_n_ctx_train(self.handle),
            n_layer=moe.n_layer,
            n_vocab=self.llama_cpp.llama_vocab_n_tokens(self.vocab),
            n_expert=moe.n_expert,
            n_expert_used=moe.n_expert_used,
            n_moe_layer=moe.n_moe_layer,
            n_threads=self.n_threads,
            device=configure.device,
            system_fingerprint=f"b{self.library.build_info()['source']}",
        )

    # vocabulary

    def min_token_count(self, n_bytes: int) -> int:
        """How many tokens a text of n_bytes has at least.

        Tokenising takes seconds for megabytes and cannot be aborted: the hopeless must be seen without it.
        """
        if n_bytes < self.n_ctx:
            return 0
        if self._longest_piece_bytes == 0:
            n_vocab = self.llama_cpp.llama_vocab_n_tokens(self.vocab)
            self._longest_piece_bytes = max(len(self.piece(token, special=True)) for token in range(n_vocab))
        return n_bytes // self._longest_piece_bytes

    def control_token(self, text: str) -> int | None:
        """The token that `text` as a whole stands for, None when it is none."""
        tokens = self._tokens_of(text.encode(), add_special=False)
        return tokens[0] if len(tokens) == 1 else None

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a templated prompt: special tokens are parsed, BOS is added unless the text has it."""
        ids = self._tokens_of(text.encode(), add_special=True)
        bos = self.llama_cpp.llama_vocab_bos(self.vocab)
        if len(ids) > 1 and ids[0] == ids[1] == bos:
            del ids[0]  # the template wrote one and the tokenizer added one
        return ids

    def _tokens_of(self, data: bytes, *, add_special: bool) -> list[int]:
        n_max = len(data) + 2
        tokens = (ctypes.c_int32 * n_max)()
        count = self.llama_cpp.llama_tokenize(self.vocab, data, len(data), tokens, n_max, add_special, True)
        if count < 0:
            raise RequestError("invalid_value", "the prompt cannot be tokenised", param="messages")
        return list(tokens[:count])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token stands for; control tokens are empty unless `special`."""
        cache = self._special_pieces if special else self._pieces
        known = cache.get(token)
        if known is not None:
            return known
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self.llama_cpp.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
            if length >= 0:
                break
            size = -length
        cache[token] = buffer.raw[:length]
        return cache[token]

    def is_end(self, token: int) -> bool:
        """Whether a token ends the model's turn."""
        known = self._ends.get(token)
        if known is None:
            known = self._ends[token] = bool(self.llama_cpp.llama_vocab_is_eog(self.vocab, token))
        return known

    # KV cache

    def reuse_prefix(self, prompt: list[int]) -> int:
        """Keeps of the KV cache what `prompt` begins with and drops the rest.

        Returns the number of kept tokens, at most len(prompt) − 1: the last token must be evaluated again,
        for its logits.
        """
        n = 0
        for ours, theirs in zip(self.kv_tokens, prompt[:-1], strict=False):
            if ours != theirs:
                break
            n += 1
        removed = n > 0 and self.llama_cpp.llama_memory_seq_rm(self.memory, 0, n, -1)
        # recurrent states cannot be cut, and a sliding window may have lost the start of what is kept
        if not removed or self.llama_cpp.llama_memory_seq_pos_min(self.memory, 0) > 0:
            self.forget()
            return 0
        del self.kv_tokens[n:]
        return n

    def forget(self) -> None:
        """Empties the KV cache. Its bytes stay: clearing them would cost each conversation milliseconds."""
        self.llama_cpp.llama_memory_clear(self.memory, False)
        self.kv_tokens.clear()

    def decode(self, tokens: list[int]) -> None:
        """Evaluates up to n_batch tokens behind the KV cache; the logits of the last are then ready.

        Raises RequestAbortedError (the KV cache is as before) and RequestError.
        """
        try:
            self.library.decode(self.context, tokens, len(self.kv_tokens))
        except NativeError as error:
            if error.status == Status.ABORTED:
                raise RequestAbortedError from error
            code = "insufficient_memory" if error.status == Status.NO_MEMORY else "internal"
            raise RequestError(code, f"decode failed: {error.message}") from error
        self.kv_tokens += tokens

    def close(self) -> None:
        self.chat_template.close()
        self.llama_cpp.llama_free(self.context)
        self.abort.close()
        self.llama_cpp.llama_model_free(self.handle)
