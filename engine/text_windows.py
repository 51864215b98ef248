"""A text cut into windows of tokens that are evaluated one by one, each from an empty KV cache."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from s2moe.engine.regular_file import check_regular


class TextError(Exception):
    """The text cannot be used; the message is one line that names the file, and never has its text."""


class Tokenizer(Protocol):
    """What is needed of `engine.model.Model`."""

    llama_cpp: Any
    vocab: Any

    def tokenize(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Window:
    tokens: list[int]
    n_prompt: int
    """Leading tokens that are evaluated as a prompt; nothing is measured there."""

    @property
    def n_scored(self) -> int:
        """Positions whose predictions are compared: from the first token behind the prompt to the last but
        one, since nothing follows the last."""
        return len(self.tokens) - self.n_prompt - 1


def read_text(path: Path, max_bytes: int) -> str:
    """The first max_bytes of a UTF-8 text. Raises TextError."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            data = file.read(max_bytes)
            more = bool(file.read(1))
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}; check the path") from error
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=not more)
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: not UTF-8 text") from error
    if not text.strip():
        raise TextError(f"{path} is empty; give a text of a few thousand words")
    return text


def cut(tokenizer: Tokenizer, path: Path, text: str, *, n_tokens: int, window_tokens: int) -> list[Window]:
    """Whole windows of the first n_tokens tokens; an eighth of each is its prompt.

    Where the vocabulary begins texts with a BOS, each window begins with one in place of its first token, as
    in llama-perplexity. Raises TextError when the text does not fill one window.
    """
    tokens = tokenizer.tokenize(text)
    bos: int | None = None
    if tokenizer.llama_cpp.llama_vocab_get_add_bos(tokenizer.vocab):
        bos = tokenizer.llama_cpp.llama_vocab_bos(tokenizer.vocab)
    n_windows = min(n_tokens, len(tokens)) // window_tokens
    if n_windows == 0:
        raise TextError(
            f"{path} has {len(tokens)} tokens, which do not fill one window of {window_tokens}; give a "
            "longer text or a smaller --window"
        )
    windows = []
    for start in range(0, n_windows * window_tokens, window_tokens):
        part = tokens[start : start + window_tokens]
        if bos is not None:
            part[0] = bos
        windows.append(Window(part, n_prompt=max(1, window_tokens // 8)))
    return windows
