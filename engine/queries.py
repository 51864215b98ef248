"""Queries: questions about the vocabulary and the chat template, answered beside whatever runs."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from s2moe.engine.backlog import Backlog
from s2moe.engine.chat_options import ChatOptions
from s2moe.engine.errors import RequestAbortedError, RequestError
from s2moe.engine.messages import (
    ApplyTemplate,
    Detokenize,
    Detokenized,
    FromEngine,
    ProtocolError,
    Query,
    QueryFailed,
    QueryReply,
    Rendered,
    Tokenize,
    Tokenized,
)
from s2moe.engine.prompt import Room, check_tokens, render

if TYPE_CHECKING:
    from s2moe.engine.model import Model

logger = logging.getLogger(__name__)

END_SECONDS: Final = 2.0
"""How long the end of the process waits for the query that is being answered."""
Send = Callable[[FromEngine], None]
TextQuery = Tokenize | Detokenize | ApplyTemplate
_Asked = TypeVar("_Asked", bound=Query)


class QueryDesk:
    """A thread that answers queries one after the other. They need no more of the model than what nothing
    changes, so they are answered while a request runs, too."""

    def __init__(self, model: Model, backlog: Backlog, send: Send) -> None:
        """`send` is called on the desk's thread and on those of its callers."""
        self._model = model
        self._backlog = backlog
        self._send = send
        self._waiting: queue.SimpleQueue[TextQuery | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="queries", daemon=True)
        self._thread.start()

    def submit(self, query: TextQuery) -> None:
        """Takes a query, which gets its reply soon; a refusal comes at once."""
        if self._backlog.enter(query):
            self._waiting.put(query)
        else:
            self._send(full(query))

    def close(self, timeout_seconds: float = END_SECONDS) -> bool:
        """Ends the thread; queries that wait stay unanswered. Returns False when the running one does not
        end in time, and then the model must not be freed."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        self._waiting.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (query := self._waiting.get()) is not None:
            try:
                reply = reply_to(query, self._answer)
                send_reply(self._send, reply)
            except OSError:
                return  # the front end is gone, and with it soon this process
            finally:
                self._backlog.leave(query)

    def _answer(self, query: TextQuery) -> QueryReply:
        match query:
            case Tokenize():
                return self._tokenize(query)
            case Detokenize():
                return self._detokenize(query)
            case ApplyTemplate():
                return self._apply_template(query)

    def _tokenize(self, query: Tokenize) -> Tokenized:
        vocabulary = self._model.vocabulary
        room = Room(self._model.n_ctx, "content", "the text has")
        room.check_bytes(vocabulary, len(query.text.encode(errors="replace")))
        tokens = vocabulary.tokenize(
            query.text, add_special=query.add_special, parse_special=query.parse_special
        )
        pieces = [vocabulary.piece(token, special=True) for token in tokens]
        return Tokenized(query_id=query.query_id, tokens=tokens, pieces=pieces)

    def _detokenize(self, query: Detokenize) -> Detokenized:
        vocabulary = self._model.vocabulary
        Room(self._model.n_ctx, "tokens", "there are").check(len(query.tokens))
        check_tokens(vocabulary, query.tokens, "tokens")
        text = b"".join(vocabulary.piece(token, special=True) for token in query.tokens)
        return Detokenized(query_id=query.query_id, text=text)

    def _apply_template(self, query: ApplyTemplate) -> Rendered:
        vocabulary = self._model.vocabulary
        room = Room(self._model.n_ctx, "messages", "the messages have")
        options = ChatOptions.read(query.chat_options_json)
        prompt = render(self._model, query.messages_json, options, room)
        room.check_bytes(vocabulary, len(prompt.text.encode(errors="replace")))
        n_tokens = len(vocabulary.tokenize_prompt(prompt.text))
        return Rendered(query_id=query.query_id, prompt=prompt.text, n_tokens=n_tokens)


def reply_to(query: _Asked, answer: Callable[[_Asked], QueryReply]) -> QueryReply:
    """The answer, or QueryFailed with why there is none."""
    try:
        return answer(query)
    except RequestError as error:
        return QueryFailed(
            query_id=query.query_id,
            code=error.code,
            message=error.message,
            param=error.param,
            n_prompt_tokens=error.n_prompt_tokens,
            n_ctx=error.n_ctx,
        )
    except RequestAbortedError:
        return QueryFailed(query_id=query.query_id, code="cancelled", message="the query was cancelled")
    except MemoryError:
        return QueryFailed(query_id=query.query_id, code="insufficient_memory", message="out of memory")
    except Exception:
        logger.exception("query %s failed", query.query_id)
        return QueryFailed(query_id=query.query_id, code="internal", message="internal error in the engine")


def send_reply(send: Send, reply: QueryReply) -> None:
    """Sends it, or that it is too long for the wire."""
    try:
        send(reply)
    except ProtocolError as error:
        message = f"the answer is too long: {error}"
        send(QueryFailed(query_id=reply.query_id, code="invalid_value", message=message))


def loading(query: Query) -> QueryFailed:
    return QueryFailed(query_id=query.query_id, code="loading", message="the model is being loaded")


def full(query: Query) -> QueryFailed:
    return QueryFailed(
        query_id=query.query_id, code="queue_full", message="too many queries wait for the engine; try again"
    )
