"""Which tokens of an answer make up its text, for protocols that give log probabilities of the text alone."""

from __future__ import annotations

from s2moe.engine.messages import Step, TokenLogprob


class TextTokens:
    """A machine that is fed with steps and picks out the tokens of their content.

    A step has the log probabilities of all its tokens, those of reasoning, tool calls and the markup around
    them, too; and where text could be the beginning of markup, it comes later than its tokens. So both are
    compared byte by byte. What tokens say in front of reasoning or a text is markup.

    Invariant: `_begun` + the bytes of `_waiting` is what tokens have said and no text has yet, in order. The
    tokens of `_begun` were given out with text before it.
    """

    def __init__(self) -> None:
        self._begun = b""
        self._waiting: list[TokenLogprob] = []
        self._kind = ""
        """What went last: reasoning, text or a call."""

    def feed(self, step: Step) -> list[TokenLogprob]:
        """The tokens that `step` has the first content of."""
        if not step.logprobs and not self._waiting and not self._begun:
            return []
        self._waiting += step.logprobs
        if step.reasoning:
            self._take("reasoning", step.reasoning)
        tokens = self._take("text", step.content) if step.content else []
        if step.tool_calls:
            # they are no longer written as the tokens have them
            self._begun, self._waiting, self._kind = b"", [], "call"
        return tokens

    def _take(self, kind: str, text: str) -> list[TokenLogprob]:
        wanted = text.encode()
        said = self._begun + b"".join(each.piece for each in self._waiting)
        goes_on, self._kind = kind == self._kind, kind
        if goes_on and said.startswith(wanted):
            begin = 0
        elif kind == "reasoning":
            # a text in the same step may have the same letters
            begin = said.find(wanted)
        else:
            # the markup in front of a beginning may have the same letters, what is held back behind it hardly
            begin = said.rfind(wanted)
        if begin < 0:
            # bytes that are no characters, which the text has as U+FFFD
            tokens, self._begun, self._waiting = self._waiting, b"", []
            return tokens
        end = begin + len(wanted)
        tokens = []
        place = len(self._begun)
        n_passed = 0
        for each in self._waiting:
            if place >= end:
                break
            if place >= begin or place + len(each.piece) > begin:
                tokens.append(each)
            place += len(each.piece)
            n_passed += 1
        del self._waiting[:n_passed]
        self._begun = said[end:place]
        return tokens
