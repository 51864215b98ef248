"""A KV cache without a library: its rows are its tokens, so that a mix-up shows."""

from __future__ import annotations

from array import array

from s2moe.engine.sequence_state import HostBuffer

BYTES_PER_TOKEN = 512


class FakeSequence:
    """What PromptCache does to the running sequence."""

    def __init__(self, *, n_window: int = 0, is_recurrent: bool = False, n_ctx: int = 100_000) -> None:
        self.tokens: list[int] = []
        """In the KV cache."""
        self.n_window = n_window
        self.first = 0
        """Position from which on all rows are there."""
        self.is_recurrent = is_recurrent
        self.n_ctx = n_ctx
        self.refuses = False
        """Whether restore() fails."""
        self.n_restored = 0

    @property
    def has_window(self) -> bool:
        return self.n_window > 0

    @property
    def copies_can_be_cut(self) -> bool:
        return not self.has_window and not self.is_recurrent

    def can_be_cut(self, n_tokens: int) -> bool:
        return not self.is_recurrent and self.first <= max(0, n_tokens - self.n_window)

    def cut(self, n_tokens: int) -> bool:
        if not self.can_be_cut(n_tokens):
            return False
        del self.tokens[n_tokens:]
        return True

    def n_bytes(self) -> int:
        return BYTES_PER_TOKEN * len(self.tokens)

    def copy_to(self, buffer: HostBuffer) -> bool:
        data = array("i", self.tokens).tobytes().ljust(self.n_bytes(), b"\xff")
        with buffer.view() as rows:
            rows[:] = data
        return True

    def restore(self, buffer: HostBuffer, n_tokens: int) -> bool:
        self.clear()
        if self.refuses:
            return False
        with buffer.view() as rows:
            assert len(rows) == BYTES_PER_TOKEN * n_tokens
            self.tokens += array("i", bytes(rows[: 4 * n_tokens]))
        self.first = max(0, n_tokens - self.n_window) if self.has_window else 0
        self.n_restored += 1
        return True

    def clear(self) -> None:
        self.tokens.clear()
        self.first = 0
