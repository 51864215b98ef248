"""One connection of a client: uvicorn's protocol, with an end to what nobody has asked for yet.

Line and headers of a request come before its API key, its body's limit and its place in the queue, and the
HTTP server below keeps as much of them as a client sends, for as many connections as clients open. Both have
a limit here, because the memory budget is for this process, too.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from s2moe.server.error_dialects import error_response
from s2moe.server.errors import ApiError, InvalidRequestError, UnavailableError
from s2moe.server.logs import choose_request_id, request_id_var

MOST_HEAD_BYTES: Final = 64 * 1024
"""Of the first line and the headers; of anything else, too, that brings a request no further: trailers, the
extensions of a chunk, empty lines."""
MOST_HEADERS: Final = 256
"""Each takes a hundred bytes, however short it is."""
MOST_PIPELINED: Final = 32
"""Requests that wait on one connection behind the one that is being answered."""
OTHER_CONNECTIONS: Final = 128
"""That may be open beside those of the queue. Each may hold MOST_HEAD_BYTES and a body of UNGATED_BYTES, and
takes 200 KiB with the task of its request."""
_FEED_BYTES: Final = 16 * 1024
"""What is read and parsed at a time, and so the error of the count where a request begins behind another."""
_HEAD_SECONDS: Final = 30.0
_LINGER_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 5
_log = logging.getLogger(__name__)


class HeadersTooLargeError(ApiError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"

    def __init__(self) -> None:
        super().__init__(
            f"URL and headers are larger than the limit of {MOST_HEAD_BYTES} bytes or {MOST_HEADERS} headers;"
            " send what is long in the body."
        )


class Connection(HttpToolsProtocol):
    """Refuses heads without end, what is no HTTP, and connections beyond `limit_concurrency`, each with an
    error of the API's shape; closes connections on which no request comes."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._most_connections = self.limit_concurrency
        self.limit_concurrency = None  # uvicorn's own answer has no shape, and comes after the headers
        self.url = b""
        self._n_head_bytes = 0
        self._running: RequestResponseCycle | None = None
        """The request whose answer is on its way; `cycle` is the newest one."""
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio reads 256 KiB at a time otherwise: four times what a body may take before its turn.
        transport.max_size = _FEED_BYTES  # type: ignore[attr-defined]
        if self._most_connections is not None and len(self.connections) > self._most_connections:
            # It takes nobody's place while it is being closed.
            self.connections.discard(self)
            self._refuse(
                UnavailableError(
                    f"There are {self._most_connections} connections already; close idle ones or try again.",
                    code="too_many_connections",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            )
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._running is not None and self._running is not self.cycle:
            _disconnect(self._running)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        begin = 0
        while begin < len(data) and not self._refused:
            n_left = MOST_HEAD_BYTES - self._n_head_bytes
            if n_left == 0:
                self._refuse(HeadersTooLargeError())
                return
            part = data[begin : begin + min(_FEED_BYTES, n_left)]
            begin += len(part)
            # Before it is parsed: what brings the request further sets the count back.
            self._n_head_bytes += len(part)
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade:
                if self._should_upgrade():
                    self.handle_websocket_upgrade()
                return
            except httptools.HttpParserError as error:
                self._refuse(_to_api_error(error))
                return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MOST_HEADERS:
            raise HeadersTooLargeError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._n_head_bytes = 0
        self._stop_timer()
        if len(self.pipeline) >= MOST_PIPELINED:
            raise InvalidRequestError(f"More than {MOST_PIPELINED} requests wait on this connection.")
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        self._n_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._n_head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()

    def _refuse(self, error: ApiError) -> None:
        """Answers with `error`, if that cannot be taken for another request's answer, and closes."""
        self._refused = True
        self._stop_timer()
        running = self._running
        if running is None or running.response_complete:
            can_answer = True
        else:
            # Its own body is at fault, or a request behind it.
            can_answer = running is self.cycle and running.more_body and not running.response_started
            _disconnect(running)
        request_id = choose_request_id(None)
        level = logging.DEBUG if error.status == InvalidRequestError.status else logging.INFO
        fields = {"status": error.status, "reason": error.message, "request_id": request_id}
        _log.log(level, "refused", extra={"fields": fields})
        if not can_answer:
            self.transport.close()
            return
        self.transport.write(self._answer(error, request_id))
        # Closing a socket with unread data would take the answer back.
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _answer(self, error: ApiError, request_id: str) -> bytes:
        token = request_id_var.set(request_id)
        try:
            response = error_response(error, self.url.partition(b"?")[0].decode("latin-1"))
        finally:
            request_id_var.reset(token)
        headers = [
            *self.server_state.default_headers,
            *response.raw_headers,
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        return b"".join((STATUS_LINE[error.status], *lines, b"\r\n", bytes(response.body)))

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _disconnect(cycle: RequestResponseCycle) -> None:
    """As uvicorn tells a request that its client has left."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _to_api_error(error: httptools.HttpParserError) -> ApiError:
    if not isinstance(error, httptools.HttpParserCallbackError):
        return InvalidRequestError(f"This is not HTTP: {error}.", code="invalid_http")
    if isinstance(error.__context__, ApiError):
        return error.__context__
    return InvalidRequestError("The URL cannot be read.", code="invalid_http")
