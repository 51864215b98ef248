"""The parts of one answer: reasoning, text and tool calls, one after the other.

Protocols that number the parts of an answer (Responses, Messages) stream and build them from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from s2moe.engine.messages import Step, TokenLogprob, ToolCallDelta
from s2moe.server.stream.text_tokens import TextTokens

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Part:
    kind: Kind
    index: int
    """From 0, over all kinds."""
    call_id: str = ""
    name: str = ""
    """Of the function that is called."""
    call_index: int = -1
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of a text: its tokens, if the request asked for them."""

    @property
    def text(self) -> str:
        """So far; of a call the arguments, as JSON text."""
        return "".join(self.pieces)


class Change(NamedTuple):
    what: Literal["open", "more", "close"]
    part: Part
    text: str = ""
    """What there is more of."""
    logprobs: Sequence[TokenLogprob] = ()
    """Of the tokens that begin in a text that there is more of."""


class AnswerParts:
    """A machine that is fed with steps and says what they change.

    At most one part is open, always the last one. What comes after a part of another kind opens a new one, so
    an order in which parts follow each other is kept.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None
        self._text_tokens = TextTokens()

    def feed(self, step: Step) -> list[Change]:
        changes: list[Change] = []
        logprobs = self._text_tokens.feed(step)
        if step.reasoning:
            self._write("reasoning", step.reasoning, changes)
        if step.content:
            self._write("text", step.content, changes, logprobs)
        for delta in step.tool_calls:
            self._write_call(delta, changes)
        return changes

    def finish(self) -> list[Change]:
        """Closes what is open. An answer of nothing gets an empty text, which clients read without asking."""
        changes: list[Change] = []
        if not self.parts:
            self._begin(Part("text", 0), changes)
        self._close(changes)
        return changes

    def _write(
        self, kind: Kind, text: str, changes: list[Change], logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        part = self._open
        if part is None or part.kind != kind:
            part = self._begin(Part(kind, len(self.parts)), changes)
        part.pieces.append(text)
        part.logprobs += logprobs
        changes.append(Change("more", part, text, logprobs))

    def _write_call(self, delta: ToolCallDelta, changes: list[Change]) -> None:
        part = self._open
        if part is None or part.kind != "call" or part.call_index != delta.index:
            call = Part("call", len(self.parts), delta.id, delta.name, delta.index)
            part = self._begin(call, changes)
        if delta.arguments:
            part.pieces.append(delta.arguments)
            changes.append(Change("more", part, delta.arguments))

    def _begin(self, part: Part, changes: list[Change]) -> Part:
        self._close(changes)
        self.parts.append(part)
        self._open = part
        changes.append(Change("open", part))
        return part

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Change("close", self._open))
            self._open = None
