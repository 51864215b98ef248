"""One response along a given text: the prompt, then steps of draft and verification that the text decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from s2moe.engine.text_windows import Window

Logits = npt.NDArray[np.float32]


class Row(Protocol):
    """struct s2moe_committed_row."""

    logits_index: int
    n_biased: int


class Follower(Protocol):
    """What is used of `native_speculation.Speculator`."""

    def begin(self, options: Mapping[str, Any]) -> None: ...

    def follow(self, root: int, position: int, text: Sequence[int]) -> int: ...

    def rows(self) -> Sequence[Row]: ...

    def report(self) -> dict[str, Any]: ...


class Decoder(Protocol):
    """What is used of `model.Model`."""

    n_batch: int

    def forget(self) -> None: ...

    def decode(self, tokens: list[int]) -> None: ...


@dataclass(frozen=True)
class Passed:
    """What one response along one window gave."""

    logits: Logits
    """[n_scored, n_vocab], float32."""
    n_biased: npt.NDArray[np.int32]
    """[n_scored] layers whose choice was changed."""
    report: dict[str, Any]
    """As s2moe_speculator_report() describes it."""
    seconds: float
    """In the steps."""


class Walker:
    """Goes along windows of text with a model and its speculator."""

    def __init__(
        self, model: Decoder, follower: Follower, n_vocab: int, read_logits: Callable[[int], Logits]
    ) -> None:
        """`read_logits(index)`: [n_vocab] of the last decode, valid until the next."""
        self._model = model
        self._follower = follower
        self._n_vocab = n_vocab
        self._read_logits = read_logits

    def walk(self, window: Window, options: Mapping[str, object]) -> Passed:
        """`options`: of s2moe_speculator_begin(). Raises RequestError and NativeError."""
        logits = np.empty((window.n_scored, self._n_vocab), dtype=np.float32)
        n_biased = np.zeros(window.n_scored, dtype=np.int32)
        self._model.forget()
        try:
            self._prefill(window)
            self._follower.begin(options)
            seconds = 0.0
            n_done = 0
            while n_done < window.n_scored:
                position = window.n_prompt + n_done
                started = time.perf_counter()
                n_tokens = self._follower.follow(
                    window.tokens[position], position, window.tokens[position + 1 :]
                )
                seconds += time.perf_counter() - started
                for number, row in enumerate(self._follower.rows(), n_done):
                    logits[number] = self._read_logits(row.logits_index)
                    n_biased[number] = row.n_biased
                n_done += n_tokens
            return Passed(logits, n_biased, self._follower.report(), seconds)
        finally:
            self._model.forget()

    def _prefill(self, window: Window) -> None:
        size = self._model.n_batch
        for start in range(0, window.n_prompt, size):
            self._model.decode(window.tokens[start : min(window.n_prompt, start + size)])
