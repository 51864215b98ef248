"""The KV rows of the conversation that runs: cut, copied out of llama.cpp into host memory, and put back."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

SEQUENCE = 0
"""The one that answers are generated in."""


def page_bytes(n_bytes: int) -> int:
    """What a HostBuffer of n_bytes takes: whole pages."""
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class HostBuffer:
    """Memory of its own, which goes back to the system at once when it is closed."""

    def __init__(self, n_bytes: int) -> None:
        """Raises MemoryError."""
        try:
            self._mapping = mmap.mmap(-1, n_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"no memory for {n_bytes} bytes") from error
        self._first = ctypes.c_uint8.from_buffer(self._mapping)
        self.n_data_bytes = n_bytes

    @property
    def n_bytes(self) -> int:
        """That it takes."""
        return page_bytes(self.n_data_bytes)

    @property
    def pointer(self) -> Any:
        """uint8_t * of ctypes; only for the duration of a call."""
        return ctypes.byref(self._first)

    def view(self) -> memoryview:
        """[n_data_bytes]; to be released before close()."""
        return memoryview(self._mapping)

    def close(self) -> None:
        if not self._mapping.closed:
            del self._first
            self._mapping.close()


class SequenceState:
    """The sequence of one context. Used by the thread that decodes, and not during a decode."""

    def __init__(self, llama_cpp: Any, model: Any, context: Any) -> None:
        """`model`, `context`: handles of llama.h."""
        self._llama_cpp = llama_cpp
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._is_recurrent = bool(
            llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
        )
        self._n_window: int = llama_cpp.llama_model_n_swa(model)
        """Tokens that some layers attend to; 0: all layers attend to all."""
        self.n_ctx: int = llama_cpp.llama_n_ctx(context)

    @property
    def has_window(self) -> bool:
        """Whether some layers attend to the last tokens only: a copy lacks the rows before."""
        return self._n_window > 0

    @property
    def copies_can_be_cut(self) -> bool:
        """Whether the first tokens of a copy are of use without the others."""
        return not self._is_recurrent and not self.has_window

    def can_be_cut(self, n_tokens: int) -> bool:
        """Whether the first n_tokens in the KV cache are of use without the others."""
        first: int = self._llama_cpp.llama_memory_seq_pos_min(self._memory, SEQUENCE)
        n_needed = min(n_tokens, self._n_window)
        return not self._is_recurrent and first <= (n_tokens - n_needed if n_needed else 0)

    def cut(self, n_tokens: int) -> bool:
        """Keeps the first n_tokens. Returns whether that was possible; if not, it is to be cleared."""
        if not self.can_be_cut(n_tokens):
            return False
        return bool(self._llama_cpp.llama_memory_seq_rm(self._memory, SEQUENCE, n_tokens, -1))

    def clear(self) -> None:
        """Its bytes stay: clearing them would cost each conversation milliseconds."""
        self._llama_cpp.llama_memory_clear(self._memory, False)

    def n_bytes(self) -> int:
        """Exact size of a copy of what there is now; 0: it cannot be copied."""
        n_bytes: int = self._llama_cpp.llama_state_seq_get_size(self._context, SEQUENCE)
        return n_bytes

    def copy_to(self, buffer: HostBuffer) -> bool:
        """`buffer`: of n_bytes(). Returns whether all is in it."""
        n_bytes: int = self._llama_cpp.llama_state_seq_get_data(
            self._context, buffer.pointer, buffer.n_data_bytes, SEQUENCE
        )
        return n_bytes == buffer.n_data_bytes

    def restore(self, buffer: HostBuffer, n_tokens: int) -> bool:
        """Replaces the sequence by a copy of n_tokens. Returns whether it is there; if not, the sequence is
        empty.

        Sums over keys depend on the order of cells. A copy has the cells in their order, which is that of
        positions, and an emptied cache takes them from its first cell on: as in a fresh prefill.
        """
        self.clear()
        n_bytes = self._llama_cpp.llama_state_seq_set_data(
            self._context, buffer.pointer, buffer.n_data_bytes, SEQUENCE
        )
        last = self._llama_cpp.llama_memory_seq_pos_max(self._memory, SEQUENCE)
        if n_bytes == buffer.n_data_bytes and last == n_tokens - 1:
            return True
        self.clear()
        return False
