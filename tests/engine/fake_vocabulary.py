"""A vocabulary without a library."""

from __future__ import annotations

from collections.abc import Mapping

END = ord(".")
"""The token that ends generation."""
CONTROL = ord("\x01")
"""A control token: `<control>`, which is no text unless that is asked for."""
N_TOKENS = 1 << 21


class FakeVocabulary:
    """Tokens are code points, but for those that `pieces` gives other bytes."""

    bos_text = eos_text = ""
    n_tokens = N_TOKENS

    def __init__(self, pieces: Mapping[int, bytes] | None = None) -> None:
        self.pieces = dict(pieces or {})
        self.longest_piece_bytes = 4
        self.tokenized: list[str] = []
        self.ends = [END]

    def __contains__(self, token: int) -> bool:
        return 0 <= token < self.n_tokens

    def min_token_count(self, n_bytes: int) -> int:
        return n_bytes // self.longest_piece_bytes

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self.tokenized.append(text)
        text = text.replace("<control>", chr(CONTROL)) if parse_special else text
        return [0] * add_special + [ord(letter) for letter in text]

    def tokenize_prompt(self, text: str) -> list[int]:
        return self.tokenize(text, add_special=False, parse_special=True)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token == CONTROL:
            return b"<control>" if special else b""
        return self.pieces[token] if token in self.pieces else chr(token).encode()

    def is_end(self, token: int) -> bool:
        return token in self.ends
