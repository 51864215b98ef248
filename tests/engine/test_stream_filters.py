"""The text filters: any cutting of any text gives the same result."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from s2moe.engine.stream.answer import AnswerStream, Delta
from s2moe.engine.stream.stop import StopFilter
from s2moe.engine.stream.utf8 import Utf8Gate

# few letters, so that stop strings overlap themselves, each other and the text
texts = st.text(alphabet="abé🙂", max_size=40)
stop_lists = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=5), max_size=4)


def cut(data: bytes | str, borders: list[int]) -> list[bytes | str]:
    points = sorted({min(border, len(data)) for border in borders} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(points)]


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, written plainly: the stop that ends first wins, of equals the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(texts, stop_lists, st.lists(st.integers(0, 40)))
@example("alpha beta gamma", ["beta gamma"], [7, 9])
@example("aab", ["ab", "aab"], [1, 2])
def test_stop_does_not_depend_on_cutting(text: str, stops: list[str], borders: list[int]) -> None:
    filter_ = StopFilter(stops)
    shown = "".join(filter_.feed(piece) for piece in cut(text, borders)) + filter_.finish()  # type: ignore[arg-type]
    assert (shown, filter_.matched) == first_stop(text, stops)


@given(texts, stop_lists)
def test_nothing_is_held_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    filter_ = StopFilter(stops)
    shown = ""
    for n, character in enumerate(text, 1):
        shown += filter_.feed(character)
        if filter_.matched is not None:
            break
        held = text[len(shown) : n]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_several_tokens_in_one_step_the_stop_that_ends_first_wins() -> None:
    filter_ = StopFilter(["delta", "beta"])
    assert filter_.feed("alpha beta gamma delta") == "alpha "
    assert filter_.matched == "beta"
    assert filter_.feed("more") == ""
    assert filter_.finish() == ""


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopFilter([""])


@given(st.text(), st.lists(st.integers(0, 200)))
def test_characters_cut_anywhere_come_out_whole(text: str, borders: list[int]) -> None:
    gate = Utf8Gate()
    pieces = [gate.feed(piece) for piece in cut(text.encode(), borders)]  # type: ignore[arg-type]
    assert "".join(pieces) + gate.finish() == text


@given(st.binary(max_size=60), st.lists(st.integers(0, 60)))
@example(b"\xe2\x9c\x85\x85 tail", [1, 2, 4])
def test_invalid_bytes_never_fail_and_never_depend_on_cutting(data: bytes, borders: list[int]) -> None:
    whole, pieces = Utf8Gate(), Utf8Gate()
    expected = whole.feed(data) + whole.finish()
    assert "".join(pieces.feed(piece) for piece in cut(data, borders)) + pieces.finish() == expected  # type: ignore[arg-type]
    expected.encode()


def test_dangling_character_at_the_end_is_dropped() -> None:
    gate = Utf8Gate()
    assert gate.feed("ok 🙂".encode()[:-1]) == "ok "
    assert gate.finish() == ""


class Brackets:
    """A parser that calls text in [ ] reasoning and holds back nothing."""

    def __init__(self) -> None:
        self._inside = False

    def feed(self, text: str, *, final: bool) -> Delta:
        content = reasoning = ""
        for character in text:
            if character in "[]":
                self._inside = character == "["
            elif self._inside:
                reasoning += character
            else:
                content += character
        return Delta(content, reasoning)


@given(st.text(alphabet="ab[]🙂", max_size=30), stop_lists, st.lists(st.integers(0, 60)))
def test_chain_gives_the_same_answer_for_any_cutting(text: str, stops: list[str], borders: list[int]) -> None:
    stream = AnswerStream(stops, Brackets())
    deltas = [stream.feed(piece) for piece in cut(text.encode(), borders)]  # type: ignore[arg-type]
    deltas.append(stream.finish())
    shown, stop = first_stop(text, stops)
    assert stream.stop_string == stop
    assert Brackets().feed(shown, final=True) == Delta(
        "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)
    )
