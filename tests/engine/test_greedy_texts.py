"""When two greedy texts count as the same."""

from __future__ import annotations

import pytest
from greedy_texts import Agreement, Summary, agreement

from s2moe.engine.messages import TokenLogprob, TopLogprob


def choice(token: int, logprob: float, **others: float) -> TokenLogprob:
    """`others`: t7=-1.5 is token 7."""
    top = {token: logprob} | {int(name[1:]): value for name, value in others.items()}
    return TokenLogprob(
        token=token,
        piece=b"",
        logprob=logprob,
        top=[TopLogprob(token=each, piece=b"", logprob=value) for each, value in top.items()],
    )


REFERENCE = [choice(1, -0.125), choice(2, -0.5, t3=-0.75), choice(4, -0.25)]


def test_same_tokens_agree() -> None:
    found = agreement(REFERENCE, [choice(1, -0.25), choice(2, -0.25), choice(4, -0.25)], 0.3)
    assert found == Agreement(3, (0.125, 0.25, 0.0))
    assert Summary.of([found]) == Summary(3, 3, 1, 0, 0.0, largest=0.25, typical=0.125)


def test_texts_may_part_at_a_near_tie_and_then_say_anything() -> None:
    found = agreement(REFERENCE, [choice(1, -0.125), choice(3, -0.5), choice(9, -5.0)], 0.3)
    assert found == Agreement(3, (0.0,), 0.25)
    assert str(Summary.of([found, agreement(REFERENCE, REFERENCE, 0.0)])) == (
        "4 of 6 tokens are the same, with log probabilities that differ by up to 0.000, half of them by less "
        "than 0.000; 1 of 2 texts part at a near tie, of at most 0.250"
    )


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ([choice(1, -0.125), choice(3, -0.5), choice(4, -0.25)], "token 1 is another one, by 0.25"),
        ([choice(8, -0.125), choice(2, -0.5), choice(4, -0.25)], "token 0 is not among the likeliest"),
        ([choice(1, -0.125), choice(2, -0.5), choice(4, -0.5)], "token 2 is less likely or likelier by 0.25"),
        ([choice(1, -0.125)], "different lengths"),
        ([], "different lengths"),
    ],
)
def test_larger_differences_fail(other: list[TokenLogprob], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        agreement(REFERENCE, other, 0.2)
