"""A stored model that drafts for itself, and answers by plain decoding to compare with, bit by bit."""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from s2moe.engine.native import Library, Sampler
from s2moe.engine.native_experts import Reader
from s2moe.engine.native_speculation import (
    N_DRAFT_SEQUENCES,
    N_VERIFY_ROWS,
    Speculator,
    set_batch_invariance,
)

from gguf_factory import ARCHITECTURES, write_random_model
from paying_drafts import with_paying_drafts
from stored_model import Layout, StoredModel

FORCED_DEPTH = 4
"""Of the tree that `"adaptive": false` drafts in every step."""

GREEDY: dict[str, Any] = {"temperature": 0}
EXACT: dict[str, Any] = {"preset": "exact", "adaptive": False}
"""Drafts in every step, and nothing may change."""
ADAPTIVE: dict[str, Any] = {"preset": "exact"}
"""Drafts where that pays; SpeculationModel.make_drafts_pay() sees to that."""

FloatArray = npt.NDArray[np.float32]


def make_batch_invariant() -> None:
    """For the whole process, before a context is created."""
    set_batch_invariance(Library(), N_VERIFY_ROWS)


@dataclass
class Answer:
    """Tokens behind a prompt, each with the logits that it was chosen from."""

    tokens: list[int] = field(default_factory=list)
    rows: list[FloatArray] = field(default_factory=list)
    """[n_vocab] each"""
    steps: list[int] = field(default_factory=list)
    """Tokens of each step; they sum up to more than `tokens` if those were cut."""
    report: dict[str, Any] = field(default_factory=dict)
    """Of the speculator; empty for plain decoding."""

    def __eq__(self, other: object) -> bool:
        """Bit by bit."""
        if not isinstance(other, Answer):
            return NotImplemented
        return self.tokens == other.tokens and self._bytes == other._bytes

    __hash__ = None  # type: ignore[assignment]

    @property
    def _bytes(self) -> list[bytes]:
        return [row.tobytes() for row in self.rows]

    def difference(self, other: Answer) -> str:
        """Where two answers part, for the message of a failed test."""
        for i, (ours, theirs) in enumerate(zip(self._bytes, other._bytes, strict=False)):
            if ours != theirs:
                largest = np.abs(self.rows[i] - other.rows[i]).max()
                same = "same tokens" if self.tokens == other.tokens else f"{self.tokens} and {other.tokens}"
                return f"row {i} of {len(self.rows)} differs by up to {largest}; steps {self.steps}; {same}"
        return f"{len(self.rows)} and {len(other.rows)} rows; {self.tokens} and {other.tokens}"


class SpeculationModel(StoredModel):
    """A stored model in a context of several sequences, with a speculator."""

    def __init__(
        self,
        path: Path,
        *,
        share: float = 1.0,
        n_ctx: int = 256,
        n_threads: int = 1,
        reader: Reader = "auto",
        draft_n_ctx: int | None = None,
        state: bytes | None = None,
    ) -> None:
        """share: of the cache between its floor (0) and every expert (1).
        draft_n_ctx: size of a second context for drafts that do not share the KV cache; None: none.
        state: what an earlier speculator learnt. Raises NativeError and RuntimeError.
        """
        self._draft_context: Any = None
        super().__init__(
            path,
            io="buffered",
            reader=reader,
            n_ctx=n_ctx,
            n_threads=n_threads,
            n_seq_max=N_DRAFT_SEQUENCES,
        )
        try:
            allocate_share(self, share)
            if draft_n_ctx is not None:
                self._draft_context = self._create_context(draft_n_ctx, N_DRAFT_SEQUENCES)
            self.speculator = Speculator(
                self.library, self._context, draft_context=self._draft_context, state=state
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if hasattr(self, "speculator"):
            self.speculator.close()
        if self._draft_context:
            llama_cpp.llama_free(self._draft_context)
            self._draft_context = None
        super().close()

    def make_drafts_pay(self, *options: dict[str, Any]) -> None:
        """Another speculator on the same context, which has learnt that drafts pay for answers with these
        options."""
        for each in options:
            self.speculator.begin(each)
        state = with_paying_drafts(self.speculator.state())
        self.speculator.close()
        self.speculator = Speculator(
            self.library, self._context, draft_context=self._draft_context, state=state
        )
        assert json.loads(self.speculator.state()) == json.loads(state), "the state was not understood"

    def answer(
        self, prompt: list[int], n_tokens: int, options: dict[str, Any], sampling: dict[str, Any] = GREEDY
    ) -> Answer:
        """`n_tokens` tokens behind a prompt of at least two, in steps of the speculator, past tokens that end
        generation. Raises NativeError."""
        run = Run(self, prompt, options, sampling)
        while len(run.answer.tokens) < n_tokens:
            run.step(n_tokens - len(run.answer.tokens))
        return run.close()


class Run:
    """One answer under way: the root is `tokens[-1]`, or the prompt's last token, not yet evaluated."""

    def __init__(
        self,
        model: SpeculationModel,
        prompt: list[int],
        options: dict[str, Any],
        sampling: dict[str, Any] = GREEDY,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self.answer = Answer()
        self.sampler = prefilled(model, prompt, sampling)
        try:
            model.speculator.begin(options)
            model.speculator.feed(prompt[:-1])
        except BaseException:
            self.sampler.close()
            raise

    @property
    def root(self) -> int:
        return self.answer.tokens[-1] if self.answer.tokens else self.prompt[-1]

    @property
    def position(self) -> int:
        return len(self.prompt) - 1 + len(self.answer.tokens)

    @property
    def kv_tokens(self) -> list[int]:
        """What the KV cache must hold."""
        return [*self.prompt, *self.answer.tokens][:-1]

    def step(self, n_max: int = N_VERIFY_ROWS) -> list[int]:
        """Returns the tokens of one step. Raises NativeError; nothing has happened then."""
        tokens = self.model.speculator.step(self.sampler, self.root, self.position, n_max)
        assert 1 <= len(tokens) <= min(n_max, N_VERIFY_ROWS), tokens
        rows = self.model.speculator.rows()
        assert len(rows) == len(tokens), f"{len(rows)} rows for {len(tokens)} tokens"
        assert [row.depth for row in rows] == list(range(len(rows)))
        self.answer.rows += [row_of(self.model, row.logits_index) for row in rows]
        self.answer.tokens += tokens
        self.answer.steps.append(len(tokens))
        assert self.model.n_kv == self.position, f"the KV cache ends at {self.model.n_kv - 1}"
        return tokens

    def cut_back(self) -> None:
        """Cuts the KV cache back to the prompt but for its last token, and begins the answer anew."""
        memory = llama_cpp.llama_get_memory(self.model.context)
        assert llama_cpp.llama_memory_seq_rm(memory, 0, len(self.prompt) - 1, -1)
        self.answer.tokens.clear()
        self.answer.rows.clear()

    def close(self) -> Answer:
        """The answer with its report."""
        self.answer.report = self.model.speculator.report()
        self.sampler.close()
        return self.answer


def write_small_model(directory: Path) -> Path:
    """A random model that decodes a token in 50 microseconds. Returns its file."""
    llama = ARCHITECTURES["llama"]
    small = replace(llama, n_embd=32, n_head=2, n_head_kv=1, head_dim=16, n_ff=32, n_ff_exp=32)
    path = directory / "small.gguf"
    write_random_model(path, small)
    return path


def plain_answer(
    model: StoredModel, prompt: list[int], n_tokens: int, sampling: dict[str, Any] = GREEDY
) -> Answer:
    """As SpeculationModel.answer(), one decode per token and without a speculator."""
    sampler = prefilled(model, prompt, sampling)
    answer, token = Answer(), prompt[-1]
    for position in range(len(prompt) - 1, len(prompt) - 1 + n_tokens):
        model.library.decode(model.context, [token], position)
        answer.rows.append(row_of(model, -1))
        token = sampler.sample(model.context)
        answer.tokens.append(token)
        answer.steps.append(1)
    sampler.close()
    return answer


def prefilled(model: StoredModel, prompt: list[int], sampling: dict[str, Any]) -> Sampler:
    """Fills an empty KV cache with the prompt but for its last token. Returns the answer's sampler."""
    model.clear()
    if len(prompt) > 1:
        model.library.decode(model.context, prompt[:-1], 0)
    sampler = Sampler(model.library, model._model, sampling)
    sampler.accept_prompt(prompt)
    return sampler


def allocate_share(model: StoredModel, share: float) -> None:
    """Gives the cache a share of the bytes between its floor and every expert."""
    floor = model.experts.floor_bytes
    model.experts.allocate(floor + int(share * (Layout.of(model.path).full_bytes - floor)))


def row_of(model: StoredModel, index: int) -> FloatArray:
    """A copy of logits of the last decode, [n_vocab]."""
    row = llama_cpp.llama_get_logits_ith(model.context, index)
    assert row, f"there are no logits at {index}"
    return np.ctypeslib.as_array(row, shape=(model.n_vocab,)).copy()


def kv_bytes(model: StoredModel, sequence: int = 0) -> bytes:
    """What the KV cache holds of a sequence (-1: of all), positions and order of cells included."""
    n_bytes = llama_cpp.llama_state_seq_get_size(model.context, sequence)
    data = (ctypes.c_uint8 * n_bytes)()
    assert llama_cpp.llama_state_seq_get_data(model.context, data, n_bytes, sequence) == n_bytes
    return bytes(data)


def last_positions(model: StoredModel) -> list[int]:
    """Of each sequence; −1: it is empty."""
    memory = llama_cpp.llama_get_memory(model.context)
    return [
        int(llama_cpp.llama_memory_seq_pos_max(memory, sequence)) for sequence in range(N_DRAFT_SEQUENCES)
    ]


def assert_branched(report: dict[str, Any]) -> None:
    """Adaptive drafting had drafts, and trees in which some token is followed by several."""
    assert report["n_admitted"] > 0
    assert report["admitted_by_depth"][0] > report["n_iterations"], "a root had one child only"
    assert sum(report["admitted_by_depth"][1:]) > 0, "all drafts were children of a root"


def assert_same(answer: Answer, expected: Answer) -> None:
    assert answer == expected, answer.difference(expected)
