"""The chain that every answer runs through: bytes → UTF-8 gate → stop filter → reasoning parser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from s2moe.engine.messages import ToolCallDelta
from s2moe.engine.stream.stop import StopFilter
from s2moe.engine.stream.utf8 import Utf8Gate


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New text of an answer, split by where it belongs."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
    """Pieces of calls, in order."""


class AnswerParser(Protocol):
    """Splits raw text into content, reasoning and tool calls; `native.NativeAnswerParser` is llama.cpp's."""

    def feed(self, text: str, *, final: bool) -> Delta: ...


class ContentOnly:
    """The parser for answers that hold nothing but content."""

    def feed(self, text: str, *, final: bool) -> Delta:
        return Delta(content=text)


class AnswerStream:
    """Turns the bytes of sampled tokens into deltas.

    Stops are searched before markup is parsed, in the raw text: a parser that held back a tag would otherwise
    cut a stop string in two. One answer, one thread.
    """

    def __init__(self, stops: Sequence[str], parser: AnswerParser | None = None) -> None:
        self._gate = Utf8Gate()
        self._stop = StopFilter(stops)
        self._parser = parser or ContentOnly()
        self._is_plain = not stops and isinstance(self._parser, ContentOnly)
        self.n_characters = 0
        """Whole characters so far, those of a stop string included."""
        self.n_passed = 0
        """Those of them that no stop string can take back any more."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, once one did."""
        return self._stop.matched

    @property
    def n_begun(self) -> int:
        """Characters so far, one of which only the first bytes are here included."""
        return self.n_characters + self._gate.pending

    def feed(self, data: bytes) -> Delta:
        """Adds the bytes of one or more tokens; returns what became certain."""
        text = self._gate.feed(data)
        self.n_characters += len(text)
        if self._is_plain:
            self.n_passed = self.n_characters
            return Delta(text)
        text = self._stop.feed(text)
        self.n_passed += len(text)
        return self._parser.feed(text, final=False) if text else Delta()

    def finish(self) -> Delta:
        """Ends the answer; returns all that was held back."""
        text = self._stop.feed(self._gate.finish()) + self._stop.finish()
        self.n_passed += len(text)
        return self._parser.feed(text, final=True)
