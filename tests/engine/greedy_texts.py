"""Greedy texts of two devices, or of two ways to decode on one: they may only part where two tokens are
nearly equal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from s2moe.engine.messages import TokenLogprob

N_TOP = 5
"""Of the likeliest tokens that the answers must name."""


@dataclass(frozen=True)
class Agreement:
    """How far two texts go together. In natural logarithms of probabilities, whose differences between tokens
    are those of logits."""

    n_tokens: int
    differences: tuple[float, ...]
    """Between what the two give to each token before the first that differs; behind it they answer different
    texts."""
    margin: float | None = None
    """Where they part: by how much the reference's token is ahead of the other's. None: they do not."""

    @property
    def n_same(self) -> int:
        return len(self.differences)


def agreement(
    reference: Sequence[TokenLogprob], other: Sequence[TokenLogprob], tolerance: float
) -> Agreement:
    """Of two answers with N_TOP logprobs. Raises AssertionError where they differ by more than the tolerance:
    in the log probability of a token that both chose, or in the reference's for the tokens that they part
    with."""
    assert len(reference) == len(other), "the texts have different lengths"
    differences: list[float] = []
    for at, (ours, theirs) in enumerate(zip(reference, other, strict=True)):
        if ours.token != theirs.token:
            near = {each.token: ours.logprob - each.logprob for each in ours.top}
            assert theirs.token in near, f"token {at} is not among the likeliest of the reference"
            margin = near[theirs.token]
            assert margin <= tolerance, f"token {at} is another one, by {margin:.3f}"
            return Agreement(len(reference), tuple(differences), margin)
        difference = abs(ours.logprob - theirs.logprob)
        assert difference <= tolerance, f"token {at} is less likely or likelier by {difference:.3f}"
        differences.append(difference)
    return Agreement(len(reference), tuple(differences))


@dataclass(frozen=True)
class Summary:
    """Of several texts."""

    n_tokens: int
    n_same: int
    n_texts: int
    n_parted: int
    largest_margin: float
    """Of those that part."""
    largest: float
    """Of the differences between tokens that are the same."""
    typical: float
    """Their median."""

    @classmethod
    def of(cls, agreements: Sequence[Agreement]) -> Summary:
        differences = [difference for each in agreements for difference in each.differences]
        margins = [each.margin for each in agreements if each.margin is not None]
        return cls(
            n_tokens=sum(each.n_tokens for each in agreements),
            n_same=len(differences),
            n_texts=len(agreements),
            n_parted=len(margins),
            largest_margin=max(margins, default=0.0),
            largest=max(differences, default=0.0),
            typical=statistics.median(differences) if differences else 0.0,
        )

    def __str__(self) -> str:
        return (
            f"{self.n_same} of {self.n_tokens} tokens are the same, with log probabilities that differ by "
            f"up to {self.largest:.3f}, half of them by less than {self.typical:.3f}; {self.n_parted} of "
            f"{self.n_texts} texts part at a near tie, of at most {self.largest_margin:.3f}"
        )
