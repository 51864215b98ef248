"""Tokens whose keys and values there are, in the KV cache or in a copy of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

ITEM_TYPE = "i"
"""Of arrays of tokens: 32 bits, signed."""
TOKEN_BYTES = array(ITEM_TYPE).itemsize


def token_array(tokens: Sequence[int]) -> array[int]:
    return array(ITEM_TYPE, tokens)


def common_prefix(ours: array[int], theirs: array[int]) -> int:
    """How many tokens both begin with."""
    high = min(len(ours), len(theirs))
    if ours[:high] == theirs[:high]:
        return high
    low = 0  # ours[:low] is common, ours[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class EvaluatedTokens:
    """The tokens at positions 0 … n−1."""

    tokens: array[int]
    n_exact: int
    """Leading tokens whose keys and values gating had no part in."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_bytes(self) -> int:
        return TOKEN_BYTES * len(self.tokens)

    def first(self, n_tokens: int) -> EvaluatedTokens:
        return EvaluatedTokens(self.tokens[:n_tokens], min(self.n_exact, n_tokens))

    def usable(self, prompt: array[int], *, exact: bool, can_be_cut: bool) -> int:
        """How many of them a prompt can begin with. `exact`: only those that gating had no part in.
        `can_be_cut`: whether some are of use without the others."""
        n = common_prefix(self.tokens, prompt)
        if exact:
            n = min(n, self.n_exact)
        return n if can_be_cut or n == len(self.tokens) else 0

    def covers(self, other: EvaluatedTokens, *, can_be_cut: bool) -> bool:
        """Whether whatever `other` can be used for, these can be used for as well."""
        if len(other) != len(self) and not (can_be_cut and len(other) < len(self)):
            return False
        return other.n_exact <= self.n_exact and self.tokens[: len(other)] == other.tokens
