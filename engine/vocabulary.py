"""A model's tokens and the bytes that they stand for."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

from s2moe.engine.errors import RequestError


class Vocabulary:
    """Reads llama.cpp's vocabulary, which nothing changes: [any thread]."""

    def __init__(self, llama_cpp: Any, model: Any) -> None:
        """`model`: a llama_model, which must outlive this object."""
        self._llama_cpp = llama_cpp
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.n_tokens: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._bos: int = llama_cpp.llama_vocab_bos(self._vocab)
        self._eos: int = llama_cpp.llama_vocab_eos(self._vocab)
        self._pieces: dict[int, bytes] = {}
        self._special_pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}
        self.longest_piece_bytes = self._find_longest_piece()

    def _find_longest_piece(self) -> int:
        """In bytes. Asks for lengths only: the answer to no buffer at all is what it must hold."""
        length, vocab = self._llama_cpp.llama_token_to_piece, self._vocab
        return max((abs(length(vocab, token, None, 0, 0, True)) for token in range(self.n_tokens)), default=0)

    def __contains__(self, token: int) -> bool:
        return 0 <= token < self.n_tokens

    @property
    def bos_text(self) -> str:
        """Of the token that begins a prompt; empty where there is none."""
        return self._text_of(self._bos)

    @property
    def eos_text(self) -> str:
        return self._text_of(self._eos)

    def _text_of(self, token: int) -> str:
        return self.piece(token, special=True).decode(errors="replace") if token in self else ""

    # text to tokens

    def min_token_count(self, n_bytes: int) -> int:
        """How many tokens a text of n_bytes has at least.

        Tokenising takes seconds for megabytes and cannot be aborted: the hopeless must be seen without it.
        """
        return n_bytes // self.longest_piece_bytes if self.longest_piece_bytes else 0

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """`add_special`: adds what the vocabulary wants around a prompt, such as BOS. `parse_special`: text
        such as `<|im_end|>` becomes the control token of that name.

        Raises RequestError for what has no tokens at all.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("invalid_value", "the text has characters that are none") from error
        n_max = len(data) + 2
        tokens = (ctypes.c_int32 * n_max)()
        count = self._llama_cpp.llama_tokenize(
            self._vocab, data, len(data), tokens, n_max, add_special, parse_special
        )
        if count < 0:
            raise RequestError("invalid_value", "the text cannot be tokenised")
        return list(tokens[:count])

    def tokenize_prompt(self, text: str) -> list[int]:
        """Tokens of a prompt: special tokens are parsed, BOS is added unless the text has it."""
        tokens = self.tokenize(text, add_special=True, parse_special=True)
        if len(tokens) > 1 and tokens[0] == tokens[1] == self._bos:
            del tokens[0]  # the template wrote one and the tokenizer added one
        return tokens

    # tokens to text

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token stands for; control tokens are empty unless `special`."""
        cache = self._special_pieces if special else self._pieces
        known = cache.get(token)
        if known is None:
            known = cache[token] = self._read_piece(token, special=special)
        return known

    def _read_piece(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self._llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if length >= 0:
                return buffer.raw[:length]
            size = -length

    # the end of a turn

    def is_end(self, token: int) -> bool:
        """Whether a token ends the model's turn."""
        known = self._ends.get(token)
        if known is None:
            known = self._ends[token] = bool(self._llama_cpp.llama_vocab_is_eog(self._vocab, token))
        return known

    @cached_property
    def ends(self) -> list[int]:
        """All tokens that end the model's turn."""
        is_eog = self._llama_cpp.llama_vocab_is_eog
        return [token for token in range(self.n_tokens) if is_eog(self._vocab, token)]
