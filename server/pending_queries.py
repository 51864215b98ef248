"""Queries that the engine has not answered yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from s2moe.engine.messages import QueryFailed, QueryReply
from s2moe.server.engine_client import EngineDiedError, QueryError

logger = logging.getLogger(__name__)


class PendingQueries:
    """Brings replies to those who wait for them. Used on the event loop."""

    def __init__(self) -> None:
        self._replies: dict[str, asyncio.Future[QueryReply]] = {}

    def __len__(self) -> int:
        return len(self._replies)

    @contextlib.contextmanager
    def expect(self, query_id: str) -> Iterator[asyncio.Future[QueryReply]]:
        """Announces a query that is about to be sent; a reply that comes after the block is dropped.

        Awaiting the future raises QueryError for QueryFailed, EngineDiedError when the process has gone.
        Raises RuntimeError when the id is in use.
        """
        if query_id in self._replies:
            raise RuntimeError(f"query {query_id} is still under way")
        future: asyncio.Future[QueryReply] = asyncio.get_running_loop().create_future()
        self._replies[query_id] = future
        try:
            yield future
        finally:
            if self._replies.get(query_id) is future:
                del self._replies[query_id]

    def on_reply(self, reply: QueryReply) -> None:
        future = self._replies.pop(reply.query_id, None)
        if future is None or future.done():
            logger.debug("dropped %s to query %s", type(reply).__name__, reply.query_id)
        elif isinstance(reply, QueryFailed):
            future.set_exception(QueryError(reply))
        else:
            future.set_result(reply)

    def fail(self, message: str) -> None:
        """The process is gone, and no reply will come."""
        replies, self._replies = self._replies, {}
        for future in replies.values():
            if not future.done():
                future.set_exception(EngineDiedError(message, generation_began=False))
