"""ctypes binding of speculative decoding in native/include/s2moe.h, in the manner of native.py."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any

from s2moe.engine.native import Library, Sampler, Status, _Handle, token_array

N_DRAFT_SEQUENCES = 8
"""Sequences that a context needs for drafts: leaves of a tree of them."""
N_VERIFY_ROWS = 8
"""Tokens of the largest verification, the root included, and so the most that one step returns."""


class CommittedRow(ctypes.Structure):
    """struct s2moe_committed_row."""

    _fields_ = (("logits_index", c_int32), ("depth", c_int32), ("n_biased", c_int32))
    logits_index: int
    depth: int
    n_biased: int


@dataclass(frozen=True)
class SpeculatorLimits:
    """What can be drafted for a model."""

    method: str
    """`s2moe`, or `off`: nothing."""
    width: bool
    """Whether several drafts may follow one token."""
    reason: str
    """Why not more; "" if all is possible."""


_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "s2moe_set_batch_invariance": (None, [c_int32]),
    "s2moe_speculator_limits": (c_int32, [c_void_p, POINTER(c_void_p)]),
    "s2moe_speculator_create": (c_void_p, [c_void_p, c_void_p, c_char_p, POINTER(c_int32)]),
    "s2moe_speculator_free": (None, [c_void_p]),
    "s2moe_speculator_begin": (c_int32, [c_void_p, c_char_p]),
    "s2moe_speculator_feed": (c_int32, [c_void_p, POINTER(c_int32), c_int32]),
    "s2moe_speculator_step": (
        c_int32,
        [c_void_p, c_void_p, c_int32, c_int32, c_int32, POINTER(c_int32), POINTER(c_int32)],
    ),
    "s2moe_speculator_follow": (
        c_int32,
        [c_void_p, c_int32, c_int32, POINTER(c_int32), c_int32, POINTER(c_int32)],
    ),
    "s2moe_speculator_rows": (c_int32, [c_void_p, POINTER(POINTER(CommittedRow)), POINTER(c_int32)]),
    "s2moe_speculator_report": (c_int32, [c_void_p, POINTER(c_void_p)]),
    "s2moe_speculator_state": (c_int32, [c_void_p, POINTER(c_void_p)]),
}


def set_batch_invariance(library: Library, n_rows: int) -> None:
    """Makes CPU kernels compute each row of a batch of up to n_rows rows as they compute it alone; 0 = as
    llama.cpp does. For the whole process, before its first context."""
    library.declare(_PROTOTYPES)
    library._lib.s2moe_set_batch_invariance(n_rows)


def speculator_limits(library: Library, model: Any) -> SpeculatorLimits:
    """Also for a model loaded with no_alloc."""
    library.declare(_PROTOTYPES)
    result = c_void_p()
    library.check(library._lib.s2moe_speculator_limits(model, byref(result)))
    limits = json.loads(library.take_string(result))
    return SpeculatorLimits(limits["method"], limits["width"], limits["reason"])


class Speculator(_Handle):
    """s2moe_speculator: drafts and verifies on one context. Close it before the context.

    Threads: as the context. Sequences 0 … N_DRAFT_SEQUENCES−1 of the context are its own; between two calls
    the KV cache holds exactly the committed tokens, in sequence 0.
    """

    _free = "s2moe_speculator_free"

    def __init__(
        self, library: Library, context: Any, *, draft_context: Any = None, state: bytes | None = None
    ) -> None:
        """`draft_context`: for drafts with a KV cache of their own; it must outlive this object. `state`:
        what `state()` returned in an earlier run.

        Raises NativeError with Status.NO_MEMORY, or INTERNAL for whatever else fails.
        """
        library.declare(_PROTOTYPES)
        status = c_int32()
        handle = library._lib.s2moe_speculator_create(context, draft_context, state, byref(status))
        super().__init__(library, handle, Status(status.value))
        self._tokens = (c_int32 * N_VERIFY_ROWS)()
        self._n_tokens = c_int32()

    def begin(self, options: Mapping[str, Any]) -> None:
        """Begins an answer. `options`: keys of s2moe_speculator_begin().

        Raises NativeError with Status.INVALID (the message begins with the key) or UNSUPPORTED.
        """
        self._library.check(self._lib.s2moe_speculator_begin(self.handle, json.dumps(dict(options)).encode()))

    def feed(self, tokens: Sequence[int]) -> None:
        """Tells which tokens the KV cache holds; after begin(), where drafts have a context of their own."""
        array = token_array(list(tokens))
        self._library.check(self._lib.s2moe_speculator_feed(self.handle, array, len(array)))

    def step(self, sampler: Sampler, root: int, position: int, n_max: int) -> list[int]:
        """Evaluates `root` at `position` behind the KV cache and returns the next tokens, 1 to
        min(n_max, N_VERIFY_ROWS); all but the last are in the KV cache then.

        Raises NativeError as Library.decode(); KV cache and sampler are then as before.
        """
        n_tokens = self._n_tokens
        self._library.check(
            self._lib.s2moe_speculator_step(
                self.handle, sampler.handle, root, position, n_max, self._tokens, byref(n_tokens)
            )
        )
        return self._tokens[: n_tokens.value]

    def follow(self, root: int, position: int, text: Sequence[int]) -> int:
        """A step along given tokens, text[i] at position + 1 + i; returns how many of them were chosen.

        Raises NativeError as step().
        """
        tokens = token_array(list(text))
        n_tokens = c_int32()
        self._library.check(
            self._lib.s2moe_speculator_follow(
                self.handle, root, position, tokens, len(tokens), byref(n_tokens)
            )
        )
        return n_tokens.value

    def rows(self) -> list[CommittedRow]:
        """The rows that the last step committed, root first."""
        rows = POINTER(CommittedRow)()
        n_rows = c_int32()
        self._library.check(self._lib.s2moe_speculator_rows(self.handle, byref(rows), byref(n_rows)))
        return [CommittedRow.from_buffer_copy(rows[index]) for index in range(n_rows.value)]

    def report(self) -> dict[str, Any]:
        """What the response has done so far."""
        result = c_void_p()
        self._library.check(self._lib.s2moe_speculator_report(self.handle, byref(result)))
        report: dict[str, Any] = json.loads(self._library.take_string(result))
        return report

    def state(self) -> bytes:
        """What was learnt about costs and confidences, as JSON to keep for the next run."""
        result = c_void_p()
        self._library.check(self._lib.s2moe_speculator_state(self.handle, byref(result)))
        return self._library.take_string(result)
