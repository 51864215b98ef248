"""Held-back text against tokens and log probabilities: each is reported once, and never taken back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from answerer import SCRIPTED, Answerer
from fake_model import FakeModel, FakeSpeculator
from fake_vocabulary import CONTROL, END, FakeVocabulary
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from s2moe.engine.messages import Finished, Step

N_CTX = 4096
# few letters, so that stop strings overlap themselves, each other and the text
texts = st.text(alphabet="abé🙂", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=5), max_size=3)
borders = st.lists(st.integers(0, 60), max_size=20)
per_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def cut(data: bytes, borders: list[int]) -> list[bytes]:
    """Pieces of text, cut between any two bytes; one that is empty stands for a control token."""
    points = sorted([min(border, len(data)) for border in borders] + [0, len(data)])
    return [data[a:b] for a, b in pairwise(points)]


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str | None]:
    """Where the text ends: the stop that ends first wins, of equals the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), stop
    return len(text), None


def answer(
    monkeypatch: pytest.MonkeyPatch, pieces: Sequence[bytes], *, width: int, markup: bool, **options: Any
) -> tuple[list[Step], Finished]:
    """The answer of tokens with these pieces."""
    model = FakeModel(FakeSpeculator(width))
    model.n_ctx = N_CTX
    model.vocabulary = FakeVocabulary({1000 + i: piece for i, piece in enumerate(pieces) if piece})
    model.chat_template.chat = {"format": SCRIPTED if markup else "content-only"}
    tokens = [1000 + i if piece else CONTROL for i, piece in enumerate(pieces)]
    return Answerer(model, monkeypatch, [*tokens, END]).answer(n_top_logprobs=0, **options)


@per_test
@given(texts, stop_lists, borders, st.integers(1, 8), st.booleans())
@example("zaba", ["abcd", "bx"], [1, 2, 3], 3, False)
@example("aé", ["é"], [2, 2], 1, False)  # a control token between the bytes of a stop string's character
def test_every_token_is_reported_once_in_order_and_none_of_a_stop_string(
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    stops: list[str],
    borders: list[int],
    width: int,
    markup: bool,
) -> None:
    pieces = cut(text.encode(), borders)
    steps, finished = answer(monkeypatch, pieces, width=width, markup=markup, stop=stops)
    end, stop = first_stop(text, stops)
    assert ("".join(step.content for step in steps), finished.stop_string) == (text[:end], stop)
    assert sum(step.n_tokens for step in steps) == finished.n_completion_tokens

    # a token belongs to the stop string if the character that it begins in does
    n_bytes = len(text[:end].encode())
    expected, n_before = [], 0
    for piece in pieces[: finished.n_completion_tokens]:
        begins = n_before < n_bytes or (n_before == n_bytes and not piece)
        if stop is not None and not begins:
            break
        expected.append(piece or b"<control>")
        n_before += len(piece)
    reported = [each.piece for step in steps for each in step.logprobs]
    assert reported == expected

    # up to the last step the two numbers agree; there the end and the stop string's tokens have none
    assert all(len(step.logprobs) == step.n_tokens for step in steps[:-1])
    assert len(steps[-1].logprobs) <= steps[-1].n_tokens


@per_test
@given(texts, stop_lists, borders)
def test_text_never_comes_before_its_tokens(
    monkeypatch: pytest.MonkeyPatch, text: str, stops: list[str], borders: list[int]
) -> None:
    pieces = cut(text.encode(), borders)
    steps, _ = answer(monkeypatch, pieces, width=1, markup=False, stop=stops)
    shown, told = b"", b""
    for step in steps:
        shown += step.content.encode()
        told += b"".join(each.piece for each in step.logprobs if each.token != CONTROL)
        assert told.startswith(shown)


@per_test
@given(texts, stop_lists, borders)
def test_width_of_steps_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, text: str, stops: list[str], borders: list[int]
) -> None:
    pieces = cut(text.encode(), borders)
    results = []
    for width in (1, 3, 8):
        steps, finished = answer(monkeypatch, pieces, width=width, markup=True, stop=stops)
        results.append(
            (
                [(step.content, step.n_tokens, step.logprobs) for step in steps],
                finished.n_completion_tokens,
            )
        )
    assert results[0] == results[1] == results[2]


def test_token_that_ends_within_a_stop_string_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, finished = answer(monkeypatch, [b"one ", b"two", b"!?", b"x"], width=1, markup=False, stop=["o!"])
    assert "".join(step.content for step in steps) == "one tw"
    assert [each.piece for step in steps for each in step.logprobs] == [b"one ", b"two"]
    assert finished.n_completion_tokens == 3
    assert [(step.n_tokens, len(step.logprobs)) for step in steps] == [(1, 1), (1, 1), (1, 0)]


def test_text_of_a_reported_token_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ab` is held back behind z; the next a lets it go, and is held back itself."""
    steps, _ = answer(monkeypatch, [b"zab", b"a", b"q"], width=1, markup=False, stop=["abcd"])
    assert [(step.content, step.n_tokens, len(step.logprobs)) for step in steps] == [
        ("z", 1, 1),
        ("ab", 0, 0),
        ("aq", 2, 2),
        ("", 1, 0),
    ]
