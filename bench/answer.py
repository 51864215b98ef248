"""One streamed answer, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """Times are CLOCK_MONOTONIC; bytes are what the kernel had read for the computing process by then."""

    text: str
    n_prompt_tokens: int
    n_tokens: int
    started_ns: int
    first_ns: int
    last_ns: int
    started_read_bytes: int
    first_read_bytes: int
    last_read_bytes: int
    timings: dict[str, float] = field(default_factory=dict)
    """The answer's own `timings`; empty for stock llama.cpp."""
    speculation: dict[str, Any] | None = None
    """The answer's own `speculation`; None: it was given without a speculator."""

    @property
    def n_intervals(self) -> int:
        """Tokens behind the first, which share the time and the bytes between the first and the last."""
        return self.n_tokens - 1

    @property
    def decode_seconds(self) -> float:
        return (self.last_ns - self.first_ns) / 1e9

    @property
    def decode_bytes(self) -> int:
        return self.last_read_bytes - self.first_read_bytes

    @property
    def tokens_per_second(self) -> float:
        return self.n_intervals / self.decode_seconds

    @property
    def first_token_seconds(self) -> float:
        return (self.first_ns - self.started_ns) / 1e9

    @property
    def prefill_bytes(self) -> int:
        return self.first_read_bytes - self.started_read_bytes


def tokens_per_second(answers: list[Answer]) -> float:
    """Of several answers together."""
    return sum(a.n_intervals for a in answers) / sum(a.decode_seconds for a in answers)


def bytes_per_token(answers: list[Answer]) -> float:
    return sum(a.decode_bytes for a in answers) / sum(a.n_intervals for a in answers)
