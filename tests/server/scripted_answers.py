"""Scripts for the fake engine: answers with tool calls, reasoning and log probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fake_engine import Action, finished, started

from s2moe.engine.messages import Generate, Step, TokenLogprob, ToolCallDelta, TopLogprob

Call = tuple[str, Mapping[str, Any]]
"""Name and arguments."""


def pieces_of(text: str, n_characters: int) -> list[str]:
    return [text[start : start + n_characters] for start in range(0, len(text), n_characters)]


def text_steps(request: Generate, text: str, *, reasoning: str = "", size: int = 3) -> Iterator[Step]:
    """`reasoning`, then `text`, `size` characters at a time."""
    for piece in pieces_of(reasoning, size):
        yield Step(request_id=request.request_id, reasoning=piece)
    for piece in pieces_of(text, size):
        yield Step(request_id=request.request_id, content=piece)


def call_steps(request: Generate, *calls: Call, size: int = 4) -> Iterator[Step]:
    """Tool calls one after the other, their arguments `size` characters at a time."""
    for index, (name, arguments) in enumerate(calls):
        opening = ToolCallDelta(index=index, id=call_id(index), name=name)
        yield Step(request_id=request.request_id, tool_calls=[opening])
        for piece in pieces_of(json.dumps(arguments), size):
            delta = ToolCallDelta(index=index, arguments=piece)
            yield Step(request_id=request.request_id, tool_calls=[delta])


def call_id(index: int) -> str:
    return f"call_{index:024d}"


def answer(request: Generate, text: str, *, reasoning: str = "", **end: Any) -> Sequence[Action]:
    """A whole script; `end` goes to finished()."""
    steps = list(text_steps(request, text, reasoning=reasoning))
    return [started(request), *steps, finished(request, **{"tokens": len(steps), **end})]


def answer_with_calls(request: Generate, *calls: Call, before: str = "", **end: Any) -> Sequence[Action]:
    """A whole script that says `before`, then calls."""
    steps = [*text_steps(request, before), *call_steps(request, *calls)]
    return [started(request), *steps, finished(request, "tool_calls", **{"tokens": len(steps), **end})]


def answer_with_logprobs(request: Generate, *tokens: tuple[str, float]) -> Sequence[Action]:
    """A token per step with its log probability and, if asked for, the second likeliest `?`."""
    n_top = request.n_top_logprobs
    steps: list[Action] = []
    for index, (piece, logprob) in enumerate(tokens):
        logprobs: list[TokenLogprob] = []
        if n_top is not None:
            best = [
                TopLogprob(token=index, piece=piece.encode(), logprob=logprob),
                TopLogprob(token=999, piece=b"?", logprob=logprob - 1),
            ]
            logprobs.append(
                TokenLogprob(token=index, piece=piece.encode(), logprob=logprob, top=best[:n_top])
            )
        steps.append(Step(request_id=request.request_id, content=piece, logprobs=logprobs))
    return [started(request), *steps, finished(request, tokens=len(tokens))]
