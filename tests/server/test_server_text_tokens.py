"""Which tokens make up the text of an answer: reasoning, calls and markup have theirs in the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2moe.engine.messages import Step, TokenLogprob, ToolCallDelta
from s2moe.server.stream.answer_parts import AnswerParts
from s2moe.server.stream.text_tokens import TextTokens

END_OF_THOUGHT = b"</think>"
CALL = [ToolCallDelta(index=0, id="call_0", name="look", arguments="{}")]


def step(*pieces: bytes, content: str = "", reasoning: str = "", calls: Sequence[ToolCallDelta] = ()) -> Step:
    logprobs = [TokenLogprob(token=1, piece=piece, logprob=-1.0) for piece in pieces]
    return Step(
        request_id="r", content=content, reasoning=reasoning, tool_calls=list(calls), logprobs=logprobs
    )


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([step(b"Hel", content="Hel"), step(b"lo", content="lo")], [[b"Hel"], [b"lo"]]),
        # thoughts, and the tag behind them, which comes with the first text
        (
            [step(b"why", reasoning="why"), step(END_OF_THOUGHT, b"\n\n", b"So", content="So")],
            [[], [b"So"]],
        ),
        # all in one speculative step
        ([step(b"why", END_OF_THOUGHT, b"So", reasoning="why", content="So")], [[b"So"]]),
        # the same, with a text that says the same
        ([step(b"why", END_OF_THOUGHT, b"why", reasoning="why", content="why")], [[b"why"]]),
        ([step(b"<think>", b"h", END_OF_THOUGHT, b"hi", reasoning="h", content="hi")], [[b"hi"]]),
        # a first letter that is in the tag, too
        ([step(b"</", b"think", b">", b"in", content="in")], [[b"in"]]),
        ([step(END_OF_THOUGHT, b"<", b"b", content="<"), step(content="b")], [[b"<"], [b"b"]]),
        # white space that is left out of the text, in a token of its own and within one
        ([step(END_OF_THOUGHT, b"\n", b" So", content="So")], [[b" So"]]),
        # what could be the beginning of a tag comes later than its token
        (
            [step(b"a", b" <", content="a "), step(b"b", content="<b"), step(b"c", content="c")],
            [[b"a", b" <"], [b"b"], [b"c"]],
        ),
        # and here it was one
        ([step(b"a", b" <", content="a "), step(b"tool>", b"{}", calls=CALL)], [[b"a", b" <"], []]),
        ([step(b"a", b"<tool>", b"{}", content="a", calls=CALL), step(b"b", content="b")], [[b"a"], [b"b"]]),
        # text behind a call
        (
            [step(b"<tool>", b"{}", calls=CALL), step(b"</tool>", b"Done", content="Done")],
            [[], [b"Done"]],
        ),
        # a character of two tokens, and one of a token that has more
        ([step(b"\xe2\x82", b"\xac", content="€")], [[b"\xe2\x82", b"\xac"]]),
        ([step(b"a\xe2\x82", content="a"), step(b"\xac", content="€")], [[b"a\xe2\x82"], [b"\xac"]]),
        # bytes that are no character
        ([step(b"\xff", content="\ufffd"), step(b"a", content="a")], [[b"\xff"], [b"a"]]),
        # a token whose text a stop string shares
        ([step(b"two", content="tw"), step(content="")], [[b"two"], []]),
        # no log probabilities were asked for
        ([step(content="a"), step(content="b")], [[], []]),
    ],
)
def test_tokens_of_the_text(steps: list[Step], expected: list[list[bytes]]) -> None:
    tokens = TextTokens()
    assert [[each.piece for each in tokens.feed(one)] for one in steps] == expected


# Each letter once, so that there is one right answer; the engine's own streams are no harder.
thoughts = st.lists(st.sampled_from("nopqäß"), unique=True, max_size=5).map("".join)
texts = st.lists(st.sampled_from("abcdeéü€🙂<"), unique=True, min_size=1, max_size=10).map("".join)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[Step], list[bytes]]:
    """Steps of an answer with reasoning, and the tokens of its text. The text may lag behind the tokens."""
    thought, text = draw(thoughts), draw(texts)
    pieces = cut(draw, thought.encode()) + ([END_OF_THOUGHT] if thought else [])
    n_before = len(pieces)
    pieces += cut(draw, text.encode())
    said, steps, waiting, begun = b"", [], [], (0, 0)
    for index, piece in enumerate(pieces):
        said += piece
        waiting.append(piece)
        is_last = index == len(pieces) - 1
        if not is_last and draw(st.booleans()):
            continue
        whole = said.decode(errors="ignore")  # but for a character that is not complete
        seen_thought, _, seen_text = whole.partition(END_OF_THOUGHT.decode()) if thought else ("", "", whole)
        n_held = 0 if is_last else draw(st.integers(0, 2))
        n_thought = min(len(thought), len(seen_thought))
        n_text = max(begun[1], len(seen_text) - n_held)
        reasoning, content = thought[begun[0] : n_thought], text[begun[1] : n_text]
        begun = (n_thought, n_text)
        if reasoning or content:
            steps.append(step(*waiting, reasoning=reasoning, content=content))
            waiting = []
    return steps, pieces[n_before:]


def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    borders = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=5)))
    edges = [0, *(border for border in borders if border < len(data)), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges) if begin < end]


@given(answers())
def test_text_has_all_its_tokens_and_no_others(answer: tuple[list[Step], list[bytes]]) -> None:
    steps, expected = answer
    parts = AnswerParts()
    shown = [change for one in steps for change in parts.feed(one) if change.what == "more"]
    (text,) = [part for part in parts.parts if part.kind == "text"]
    assert [each.piece for each in text.logprobs] == expected
    assert all(part.logprobs == [] for part in parts.parts if part is not text)
    assert [each for change in shown for each in change.logprobs] == text.logprobs
    # no text comes before the token that it begins in
    n_said = n_shown = 0
    for change in shown:
        if change.part is text:
            n_said += sum(len(each.piece) for each in change.logprobs)
            n_shown += len(change.text.encode())
            assert n_said >= n_shown
