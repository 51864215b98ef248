"""Which tokens of an answer have been reported, and which still wait for a possible stop string."""

from __future__ import annotations

from collections import deque

from s2moe.engine.messages import TokenLogprob


class TokenLedger:
    """The tokens that no Step has reported yet, in order.

    A token is reported once the character that it begins in has passed the stop filter, so nothing that was
    reported ever has to be taken back: a token that begins within a stop string is not.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, TokenLogprob | None]] = deque()
        """Characters that must have passed before the token is certain, less one; its log probability."""

    def add(self, n_before: int, logprob: TokenLogprob | None = None) -> None:
        """`n_before`: whole characters of the answer before this token."""
        self._waiting.append((n_before, logprob))

    def add_control(self, n_begun: int, logprob: TokenLogprob | None = None) -> None:
        """A token that stands for no text: certain as soon as the `n_begun` characters that begin before it
        are."""
        self._waiting.append((n_begun - 1, logprob))

    def take(self, n_passed: int) -> tuple[int, list[TokenLogprob]]:
        """Takes out the tokens that are certain now that n_passed characters have passed the stop filter:
        their number, and log probabilities of those that have one."""
        n_tokens = 0
        logprobs = []
        while self._waiting and self._waiting[0][0] < n_passed:
            _, logprob = self._waiting.popleft()
            n_tokens += 1
            if logprob is not None:
                logprobs.append(logprob)
        return n_tokens, logprobs

    def take_all(self) -> tuple[int, list[TokenLogprob]]:
        """The same for an answer that has ended without a stop string: everything is certain."""
        logprobs = [logprob for _, logprob in self._waiting if logprob is not None]
        n_tokens = len(self._waiting)
        self._waiting.clear()
        return n_tokens, logprobs

    def take_stopped(self, n_passed: int) -> tuple[int, list[TokenLogprob]]:
        """The same for an answer that a stop string has ended: the stop string's own tokens are counted,
        without their log probabilities."""
        n_certain, logprobs = self.take(n_passed)
        n_rest, _ = self.take_all()
        return n_certain + n_rest, logprobs
