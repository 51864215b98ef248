"""Stop strings across any borders."""

from __future__ import annotations

from collections.abc import Sequence


class _Matcher:
    """Knuth-Morris-Pratt automaton of one stop string: how much of it the text so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.length = 0
        """Length of the longest prefix of the pattern that the text ends with."""
        self._failure = [0] * len(pattern)
        border = 0
        for i in range(1, len(pattern)):
            while border and pattern[i] != pattern[border]:
                border = self._failure[border - 1]
            border += pattern[i] == pattern[border]
            self._failure[i] = border

    def step(self, character: str) -> bool:
        """Returns True when the text now ends with the whole pattern; the matcher is then spent."""
        while self.length and self.pattern[self.length] != character:
            self.length = self._failure[self.length - 1]
        self.length += self.pattern[self.length] == character
        return self.length == len(self.pattern)


class StopFilter:
    """Passes text on until a stop string is complete; the stop string itself is not passed on.

    Of several stop strings the one that ends first wins, of those that end together the longest. Held back is
    only a suffix that is a proper prefix of a stop string. The result does not depend on how the text is cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would hold back everything for ever."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, once one did."""

    def feed(self, text: str) -> str:
        """Returns what may be shown. After a match, everything is swallowed."""
        if not self._matchers:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        start = len(self._held) - len(text)
        for end, character in enumerate(text, start + 1):
            complete = [matcher.pattern for matcher in self._matchers if matcher.step(character)]
            if complete:
                self.matched = max(complete, key=len)
                released, self._held = self._held[: end - len(self.matched)], ""
                return released
        keep = max(matcher.length for matcher in self._matchers)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def finish(self) -> str:
        """Ends the text; returns what was held back for a stop string that never came."""
        released, self._held = self._held, ""
        return released
