"""How large request bodies may be, and how much of them is read at the same time.

A body takes several times its size in the front end until it is parsed, and the memory plan sets a fixed
amount aside for both processes: bodies without end, or many at once, would break the budget.
"""

from __future__ import annotations

import asyncio
from collections import deque

from s2moe.engine.messages import ModelInfo
from s2moe.server.errors import RequestTooLargeError

ESCAPED_BYTES = 6
"""A byte of text in JSON at worst: a backslash, a `u` and four digits."""
OTHER_FIELDS_BYTES = 64 * 1024
"""Of a body, besides its messages."""
LEAST_LIMIT_BYTES = 256 * 1024
LEAST_ALLOWANCE_BYTES = 1024 * 1024
UNGATED_BYTES = 64 * 1024
"""The HTTP server reads that much of a body by itself before anybody asks for it."""
FIRST_PART_BYTES = 256 * 1024
"""Of a body whose length nobody knows; one that has more may become as long as the limit."""


class BodyLimit:
    """What the operator allows, or less: no prompt that is longer than the context in the model's longest
    tokens can be answered."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def of_model(self, model: ModelInfo | None) -> int:
        """In bytes. None, a model that does not tell, or one that takes many texts at once: what the operator
        allows."""
        if model is None or model.gives_embeddings or not model.longest_piece_bytes:
            return self._max_bytes
        prompt_bytes = ESCAPED_BYTES * model.n_ctx * model.longest_piece_bytes
        return min(self._max_bytes, max(LEAST_LIMIT_BYTES, prompt_bytes + OTHER_FIELDS_BYTES))

    def refusal(self, model: ModelInfo | None) -> RequestTooLargeError:
        limit_bytes = self.of_model(model)
        if model is None or limit_bytes == self._max_bytes:
            return RequestTooLargeError(limit_bytes, "--max-body-size")
        return RequestTooLargeError(
            limit_bytes, f"no longer prompt fits the context of {model.n_ctx} tokens, --ctx-size"
        )


class BodyGate:
    """Lets bodies in as long as all that are being read keep an allowance of bytes; the rest waits, first
    come, first served. One alone is always let in. All methods are called on the event loop."""

    def __init__(self) -> None:
        self._taken_bytes = 0
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()

    async def enter(self, n_bytes: int, allowance_bytes: int) -> None:
        """Waits its turn; `leave` must follow once, unless the wait is cancelled."""
        if not self._waiting and self._admits(n_bytes, allowance_bytes):
            self._taken_bytes += n_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (n_bytes, allowance_bytes, turn)
        self._waiting.append(entry)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.leave(n_bytes)  # let in during the very turn in which this task was cancelled
            else:
                self._waiting.remove(entry)
                self._let_in()
            raise

    def leave(self, n_bytes: int) -> None:
        self._taken_bytes -= n_bytes
        self._let_in()

    def _admits(self, n_bytes: int, allowance_bytes: int) -> bool:
        return self._taken_bytes == 0 or self._taken_bytes + n_bytes <= allowance_bytes

    def _let_in(self) -> None:
        while self._waiting:
            n_bytes, allowance_bytes, turn = self._waiting[0]
            if turn.cancelled():
                return  # its own task takes it out
            if not self._admits(n_bytes, allowance_bytes):
                return
            self._waiting.popleft()
            self._taken_bytes += n_bytes
            turn.set_result(None)
