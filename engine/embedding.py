"""Embeddings: what a model that was trained for it makes of whole texts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from s2moe.engine.errors import EngineStartError, RequestAbortedError, RequestError
from s2moe.engine.vocabulary import Vocabulary

N_SEQUENCES: Final = 16
"""Texts evaluated at once, at most."""
HEADER_BYTES: Final = 1 << 20
"""Converters write what describes a model well before its vocabulary, within so many bytes."""
POOLING_KEY: Final = "pooling_type"
_EMBEDDING_POOLINGS: Final = frozenset({"1", "2", "3"})
"""mean, cls and last of enum llama_pooling_type."""
_RANK_POOLING: Final = "4"
_ABORTED, _NO_MEMORY = 2, -2
"""What llama_decode() returns."""


def may_name_pooling(path: Path | str) -> bool:
    """Whether it is worth the time to load the metadata of a GGUF file. Raises OSError."""
    with Path(path).open("rb") as file:
        return f".{POOLING_KEY}".encode() in file.read(HEADER_BYTES)


def gives_embeddings(pooling_type: str, path: Path | str) -> bool:
    """`pooling_type`: that of the model's metadata, "" where it names none. Raises EngineStartError for a
    model of another purpose."""
    if pooling_type == _RANK_POOLING:
        raise EngineStartError(
            "model_unsupported",
            f"{path} is a reranker, which neither generates text nor gives embeddings; serve another model",
        )
    return pooling_type in _EMBEDDING_POOLINGS


class Embedder:
    """A context that pools. Used by the thread that decodes."""

    def __init__(self, llama_cpp: Any, model: Any, context: Any, vocabulary: Vocabulary) -> None:
        """`model`, `context`: handles of llama.h, which must outlive this object."""
        self._llama_cpp = llama_cpp
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._vocabulary = vocabulary
        self.n_embd: int = llama_cpp.llama_model_n_embd_out(model)
        self.n_max_tokens = min(
            # pooling needs all tokens in one micro-batch, and encoders know no later position than trained
            *(llama_cpp.llama_n_ubatch(context), llama_cpp.llama_n_ctx(context)),
            llama_cpp.llama_model_n_ctx_train(model),
        )
        """Of a text."""
        self._n_max_inputs: int = llama_cpp.llama_n_seq_max(context)
        self._batch = llama_cpp.llama_batch_init(self.n_max_tokens, 0, 1)

    def close(self) -> None:
        if self._batch is not None:
            self._llama_cpp.llama_batch_free(self._batch)
            self._batch = None

    def embed(self, texts: list[str], token_lists: list[list[int]]) -> tuple[list[list[float]], list[int]]:
        """Returns a vector of length 1 [n_embd] for each text and then for each list of tokens, and how many
        tokens each had.

        Raises RequestError and RequestAbortedError.
        """
        inputs = [self._tokens_of(text) for text in texts] + token_lists
        for tokens in inputs:
            self._check(tokens)
        vectors: list[list[float]] = []
        for group in self._groups(inputs):
            vectors += self._evaluate(group)
        return vectors, [len(tokens) for tokens in inputs]

    def _tokens_of(self, text: str) -> list[int]:
        n_least = self._vocabulary.min_token_count(len(text.encode(errors="replace")))
        self._check_length(n_least, at_least=True)
        return self._vocabulary.tokenize(text, add_special=True, parse_special=False)

    def _check(self, tokens: list[int]) -> None:
        if not tokens:
            raise RequestError("invalid_value", "an input has no tokens", param="input")
        for token in tokens:
            if token not in self._vocabulary:
                message = f"token {token} is not in the vocabulary of {self._vocabulary.n_tokens} tokens"
                raise RequestError("invalid_value", message, param="input")
        self._check_length(len(tokens))

    def _check_length(self, n_tokens: int, *, at_least: bool = False) -> None:
        if n_tokens <= self.n_max_tokens:
            return
        count = f"at least {n_tokens}" if at_least else str(n_tokens)
        # the first words are those by which clients know an overflow, see prompt.Room
        raise RequestError(
            "context_length_exceeded",
            f"This model's maximum context length is {self.n_max_tokens} tokens, but an input has {count}. "
            "Shorten it, or serve with a larger --batch-size and --ctx-size where the model was trained for "
            "that.",
            param="input",
            n_prompt_tokens=n_tokens,
            n_ctx=self.n_max_tokens,
        )

    def _groups(self, inputs: list[list[int]]) -> Iterator[list[list[int]]]:
        """Of neighbours that fit into one batch."""
        group: list[list[int]] = []
        n_tokens = 0
        for tokens in inputs:
            if group and (len(group) == self._n_max_inputs or n_tokens + len(tokens) > self.n_max_tokens):
                yield group
                group, n_tokens = [], 0
            group.append(tokens)
            n_tokens += len(tokens)
        if group:
            yield group

    def _evaluate(self, group: list[list[int]]) -> Iterator[list[float]]:
        batch = self._batch
        batch.n_tokens = 0
        for sequence, tokens in enumerate(group):
            for position, token in enumerate(tokens):
                i = batch.n_tokens
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = True
                batch.n_tokens = i + 1
        with contextlib.ExitStack() as stack:
            if self._memory:
                self._llama_cpp.llama_memory_clear(self._memory, False)
                stack.callback(self._llama_cpp.llama_memory_clear, self._memory, False)
            _check_result(self._llama_cpp.llama_decode(self._context, batch))
        return (self._vector(sequence) for sequence in range(len(group)))

    def _vector(self, sequence: int) -> list[float]:
        pooled = self._llama_cpp.llama_get_embeddings_seq(self._context, sequence)
        values: list[float] = pooled[: self.n_embd] if pooled else []
        length = math.hypot(*values)
        if not 0 < length < math.inf:
            raise RequestError(
                "numeric_error", "the model computed an embedding that has no direction; it may be damaged"
            )
        return [value / length for value in values]


def _check_result(result: int) -> None:
    """Raises RequestError and RequestAbortedError."""
    if result == _ABORTED:
        raise RequestAbortedError
    if result != 0:
        code = "insufficient_memory" if result == _NO_MEMORY else "internal"
        raise RequestError(code, f"the evaluation failed with code {result}")
