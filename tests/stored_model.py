"""A model whose experts come from the drive through the expert store, and runs to compare bit by bit."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from s2moe.engine.native import Library
from s2moe.engine.native_experts import Experts, Io, Policy, Reader, Residency, model_layout

from llama_model import LlamaModel

IdArray = npt.NDArray[np.int32]
PROMPT = [40 + (7 * i) % 200 for i in range(20)]


class StoredModel(LlamaModel):
    """Opens the store, loads the dense weights, and gives the cache `capacity_bytes` (None: the floor)."""

    def __init__(
        self,
        path: Path,
        capacity_bytes: int | None = None,
        *,
        io: Io = "direct",
        reader: Reader = "auto",
        n_ctx: int = 128,
        n_threads: int = 1,
        allocate: bool = True,
        n_seq_max: int = 1,
        policy: Policy = "cache",
    ) -> None:
        """allocate: False leaves the cache without slots. Raises NativeError and RuntimeError."""
        self.library = Library()
        self.experts = Experts(self.library, path, io=io, reader=reader, policy=policy)
        try:
            super().__init__(
                path,
                n_ctx=n_ctx,
                n_threads=n_threads,
                buffer_overrides=self.experts.overrides,
                n_seq_max=n_seq_max,
            )
            if allocate:
                self.experts.allocate(self.experts.floor_bytes if capacity_bytes is None else capacity_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def context(self) -> Any:
        return self._context

    @property
    def n_kv(self) -> int:
        """Positions that the KV cache holds."""
        memory = llama_cpp.llama_get_memory(self._context)
        return 1 + int(llama_cpp.llama_memory_seq_pos_max(memory, 0))

    def close(self) -> None:
        if hasattr(self, "_model"):
            super().close()
        self.experts.close()

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def decode(self, tokens: list[int], *, position: int) -> npt.NDArray[np.float32]:
        """As the base class, through s2moe_decode(). Raises NativeError."""
        self.library.decode(self._context, tokens, position, all_logits=True)
        rows = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(rows, shape=(len(tokens), self.n_vocab)).copy()

    def router_ids(self) -> IdArray:
        """Of the last decode, [n_layer, n_tokens, k]."""
        return self.library.router_ids(self._context)


@dataclass(frozen=True)
class Layout:
    """What s2moe_model_layout() says, as the tests need it."""

    document: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> Layout:
        return cls(model_layout(Library(), path))

    @property
    def layers(self) -> list[dict[str, Any]]:
        layers: list[dict[str, Any]] = self.document["layers"]
        return layers

    @property
    def expert_bytes(self) -> dict[int, int]:
        """Bytes of one expert in the file, by layer."""
        return {layer["layer"]: layer["expert_bytes"] for layer in self.layers}

    @property
    def n_experts(self) -> int:
        """Of all layers together."""
        return sum(layer["n_expert"] for layer in self.layers)

    @property
    def full_bytes(self) -> int:
        """Slots for every expert."""
        classes = self.document["classes"]
        return sum(classes[layer["class"]]["slot_bytes"] * layer["n_expert"] for layer in self.layers)


@dataclass(frozen=True)
class Transcript:
    """Greedy text after a prompt, and every logit on the way."""

    tokens: list[int]
    logits: npt.NDArray[np.float32]
    """[n_prompt + n_tokens, n_vocab]"""

    def __eq__(self, other: object) -> bool:
        """Bit by bit."""
        if not isinstance(other, Transcript):
            return NotImplemented
        return self.tokens == other.tokens and self.logits.tobytes() == other.logits.tobytes()

    __hash__ = None  # type: ignore[assignment]

    def difference(self, other: Transcript) -> str:
        """Where two transcripts part, for the message of a failed test."""
        differs = (self.logits.view(np.uint32) != other.logits.view(np.uint32)).any(axis=1)
        rows = np.flatnonzero(differs)
        largest = np.abs(self.logits - other.logits).max()
        return f"rows {rows.tolist()} differ, by up to {largest}; tokens {self.tokens} and {other.tokens}"


def transcribe(
    model: LlamaModel, *, width: int = len(PROMPT), n_tokens: int = 24, prompt: list[int] = PROMPT
) -> Transcript:
    """PROMPT in batches of `width` tokens from an empty KV cache, then `n_tokens` greedy ones one by one."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(model._context), True)
    rows = [
        model.decode(prompt[begin : begin + width], position=begin) for begin in range(0, len(prompt), width)
    ]
    tokens: list[int] = []
    for i in range(n_tokens):
        tokens.append(int(rows[-1][-1].argmax()))
        rows.append(model.decode([tokens[-1]], position=len(prompt) + i))
    return Transcript(tokens, np.concatenate(rows))


def lookups(ids: IdArray) -> Counter[tuple[int, int]]:
    """The (layer, expert) pairs that a decode looks up once each. ids: [n_layer, n_tokens, k]"""
    pairs = {(layer, int(expert)) for layer in range(len(ids)) for expert in ids[layer].ravel()}
    return Counter(pair for pair in pairs if pair[1] >= 0)


def resident_set(experts: Experts) -> set[tuple[int, int]]:
    return {
        (layer, expert)
        for layer in experts.layers
        for expert, state in enumerate(experts.residency(layer))
        if state == Residency.RESIDENT
    }


def settle(experts: Experts) -> None:
    """Waits until nothing is on its way."""
    deadline = time.monotonic() + 20
    while any(Residency.IN_FLIGHT in experts.residency(layer) for layer in experts.layers):
        assert time.monotonic() < deadline, "reads do not end"
        time.sleep(0.001)
