"""How much may wait in the engine."""

from __future__ import annotations

import threading
from typing import Final

from s2moe.engine.messages import ApplyTemplate, Detokenize, Embed, Query, Tokenize

MAX_WAITING: Final = 64
MAX_WAITING_BYTES: Final = 32 * 1024 * 1024
_BYTES_PER_TOKEN: Final = 36
"""Of a list of integers."""


class Backlog:
    """Admits queries until they are too many or too large, so that a flood of them takes no memory that the
    plan does not know of. [any thread]"""

    def __init__(self, *, max_waiting: int = MAX_WAITING, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._n_waiting = 0
        self._n_bytes = 0

    def enter(self, query: Query) -> bool:
        """Returns False when there is no room. One query alone is always let in."""
        n_bytes = _size_bytes(query)
        with self._lock:
            is_full = self._n_waiting >= self._max_waiting or self._n_bytes + n_bytes > self._max_bytes
            if is_full and self._n_waiting:
                return False
            self._n_waiting += 1
            self._n_bytes += n_bytes
            return True

    def leave(self, query: Query) -> None:
        """The query that was let in has been answered."""
        with self._lock:
            self._n_waiting -= 1
            self._n_bytes -= _size_bytes(query)


def _size_bytes(query: Query) -> int:
    """About what it takes in memory."""
    match query:
        case Tokenize():
            return len(query.text)
        case Detokenize():
            return len(query.tokens) * _BYTES_PER_TOKEN
        case ApplyTemplate():
            return len(query.messages_json) + len(query.chat_options_json)
        case Embed():
            n_tokens = sum(len(tokens) for tokens in query.token_lists)
            return sum(len(text) for text in query.texts) + n_tokens * _BYTES_PER_TOKEN
