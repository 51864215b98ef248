"""Pure ASGI layers around the application, outermost first:

RequestContext   request id, access log, HTTP metrics
(CORS)           Starlette's own, only when an origin is configured
LastResort       500 for exceptions that nobody else has turned into an answer
ApiKey           401
BodyReading      413, 408, 429, and how many bodies are read at a time
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from s2moe.server.api.docs import DOCS_PATHS, DOCS_ROUTES
from s2moe.server.api.page import PAGE_PATHS, PAGE_ROUTES
from s2moe.server.body_gate import (
    FIRST_PART_BYTES,
    LEAST_ALLOWANCE_BYTES,
    UNGATED_BYTES,
    BodyGate,
    BodyLimit,
)
from s2moe.server.engine_client import EngineClient
from s2moe.server.error_dialects import error_response
from s2moe.server.errors import CLIENT_GONE_STATUS, AuthenticationError, BodyQueueError, BodyTimeoutError
from s2moe.server.logs import choose_request_id, request_id_var
from s2moe.server.metrics import METHODS, NO_ROUTE, OTHER_METHOD, Metrics
from s2moe.server.recorder import RequestRecorder

_HEALTH_PATHS = frozenset({"/health", "/v1/health"})
OPEN_PATHS = _HEALTH_PATHS | PAGE_PATHS | DOCS_PATHS
_QUIET_ROUTES = frozenset({"/metrics", *PAGE_ROUTES, *DOCS_ROUTES})
_access_log = logging.getLogger("s2moe.server.access")
_log = logging.getLogger(__name__)

BODY_SEND_KEY = "s2moe.body_send"
"""Scope key of a `send` for body chunks that are not the last: no layer has anything to do with them, and a
stream that passes all layers with each token pays for it with each token."""


class RequestContext:
    """Gives each request an id, which every answer and every log line carries, and accounts for it."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = choose_request_id(Headers(scope=scope).get("x-request-id"))
        token = request_id_var.set(request_id)
        began = time.monotonic()
        status = 0
        complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        scope[BODY_SEND_KEY] = send
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            code = status if complete else CLIENT_GONE_STATUS
            self._account(scope, code, time.monotonic() - began)
            request_id_var.reset(token)

    def _account(self, scope: Scope, code: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", NO_ROUTE)
        method = scope["method"] if scope["method"] in METHODS else OTHER_METHOD
        self._metrics.http_requests.labels(route, method, str(code)).inc()
        self._metrics.http_duration.labels(route).observe(seconds)
        fields = {"method": method, "route": route, "status": code, "seconds": round(seconds, 6)}
        state: Mapping[str, object] = scope.get("state", {})
        recorder = state.get("recorder")
        if isinstance(recorder, RequestRecorder):
            fields["prompt_tokens"] = recorder.n_prompt_tokens
            fields["generated_tokens"] = recorder.n_generated_tokens
        # who waits for the server asks often, and why it is not ready is in the log already
        quiet = route in _HEALTH_PATHS or (route in _QUIET_ROUTES and code < 400)
        _access_log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})


class LastResort:
    """Turns an exception into an answer, unless one was begun. Inside CORS: a web page may read it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = False

        async def send_and_note(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if began:
                # Too late for an answer; the server closes the connection and logs the error.
                raise
            _log.exception("unhandled error")
            await error_response(error, scope["path"])(scope, receive, send)


class ApiKey:
    """Asks for the key in `Authorization: Bearer` or `x-api-key`, except on OPEN_PATHS and for preflights."""

    def __init__(self, app: ASGIApp, *, key: bytes) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            headers = Headers(scope=scope)
            if not self._accepts(headers):
                given = "authorization" in headers or "x-api-key" in headers
                message = (
                    "The API key is wrong."
                    if given
                    else "Send an API key in the header `Authorization: Bearer`."
                )
                await error_response(AuthenticationError(message), scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _accepts(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        candidates = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            candidates.append(bearer.strip())
        # Headers are latin-1 text, and compare_digest wants bytes for anything beyond ASCII.
        return any(hmac.compare_digest(each.encode("latin-1"), self._key) for each in candidates)


class BodyReading:
    """Refuses bodies beyond the limit, at once by Content-Length, else when the bytes have come; lets large
    ones wait until others have been read, but not for ever; gives up on those that come too slowly."""

    patience_seconds = 30.0
    """Without progress, and altogether beyond what the least rate takes."""
    turn_patience_seconds = 60.0
    """For the turn of a large body: more, so that one that has come to a halt has made room by then."""
    least_rate = 16 * 1024
    """Bytes per second."""

    def __init__(self, app: ASGIApp, *, client: EngineClient, max_bytes: int) -> None:
        self._app = app
        self._client = client
        self._limit = BodyLimit(max_bytes)
        self._gate = BodyGate()
        self._first_parts_gate = BodyGate()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit_bytes = self._limit.of_model(self._client.model)
        text = headers.get("content-length", "")
        declared = None if "transfer-encoding" in headers else int(text) if text.isdigit() else 0
        if declared is not None and declared > limit_bytes:
            refusal = self._limit.refusal(self._client.model)
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        body = _Body(self, receive, declared, limit_bytes)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.end()

    async def enter(self, n_bytes: int, limit_bytes: int) -> BodyGate:
        """Waits until a body, or the rest of one, may be read. Returns the gate that is to be left."""
        await self._gate.enter(n_bytes, max(LEAST_ALLOWANCE_BYTES, limit_bytes))
        return self._gate

    async def enter_first_part(self) -> BodyGate:
        """The same for the first part of a body of unknown length. Apart, since in one gate two bodies that
        keep their first parts and wait for their rests would wait for each other.

        They keep them because they are in memory: where all that fit this gate wait behind one slow body,
        the first parts of others do, too."""
        await self._first_parts_gate.enter(FIRST_PART_BYTES, LEAST_ALLOWANCE_BYTES)
        return self._first_parts_gate

    def refusal(self) -> Exception:
        return self._limit.refusal(self._client.model)


class _Body:
    """The body of one request on its way in."""

    def __init__(
        self, reading: BodyReading, receive: Receive, declared_bytes: int | None, limit_bytes: int
    ) -> None:
        """`declared_bytes`: None = nobody knows."""
        self._reading = reading
        self._receive = receive
        self._declared_bytes = declared_bytes
        self._limit_bytes = limit_bytes
        self._n_bytes = 0
        self._held: list[tuple[BodyGate, int]] = []
        self._began: float | None = None
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        await self._wait_for_turn()
        if self._began is None:
            self._began = time.monotonic()
        try:
            async with asyncio.timeout(self._patience_seconds(self._began)):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeoutError from None
        if message["type"] == "http.request":
            self._n_bytes += len(message.get("body", b""))
            if self._n_bytes > self._limit_bytes:
                raise self._reading.refusal()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._complete = True
            # Whoever waits runs when this task waits again: after it has parsed the body.
            self.end()
        return message

    def end(self) -> None:
        """Gives back what it holds of the allowances."""
        held, self._held = self._held, []
        for gate, n_bytes in held:
            gate.leave(n_bytes)

    async def _wait_for_turn(self) -> None:
        """Returns once what comes next may be read. Raises BodyQueueError."""
        if self._declared_bytes is not None:
            if self._declared_bytes > UNGATED_BYTES and not self._held:
                await self._enter(
                    self._reading.enter(self._declared_bytes, self._limit_bytes), self._declared_bytes
                )
        elif self._n_bytes > UNGATED_BYTES and not self._held:
            await self._enter(self._reading.enter_first_part(), FIRST_PART_BYTES)
        elif self._n_bytes > FIRST_PART_BYTES and len(self._held) == 1:
            rest_bytes = self._limit_bytes - FIRST_PART_BYTES
            await self._enter(self._reading.enter(rest_bytes, self._limit_bytes), rest_bytes)

    async def _enter(self, turn: Coroutine[Any, Any, BodyGate], n_bytes: int) -> None:
        waits_since = time.monotonic()
        patience = self._reading.turn_patience_seconds
        try:
            async with asyncio.timeout(patience):
                self._held.append((await turn, n_bytes))
        except TimeoutError:
            raise BodyQueueError(patience) from None
        if self._began is not None:
            self._began += time.monotonic() - waits_since  # not the client's time

    def _patience_seconds(self, began: float) -> float:
        patience = self._reading.patience_seconds
        due = began + patience + self._n_bytes / self._reading.least_rate
        return max(0.0, min(patience, due - time.monotonic()))
