"""One tree of API errors, and the one place where an exception becomes what an HTTP answer says.

Each error has a status, an OpenAI error type and a string code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from s2moe.engine.messages import Failed, QueryFailed
from s2moe.server.engine_client import (
    EngineDiedError,
    EngineError,
    EngineState,
    EngineStoppingError,
    EngineUnavailableError,
    QueryError,
    TooLongForEngineError,
)

CLIENT_GONE_STATUS = 499
_DRAINING_RETRY_SECONDS = 10
_BODY_RETRY_SECONDS = 10


class ApiError(Exception):
    """An error as the client sees it. Subclasses fix status and type; `code` names the case."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})


class InvalidRequestError(ApiError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"

    def __init__(self, what: str, *, n_tokens: int, n_ctx: int, param: str | None) -> None:
        """`what` has so many tokens, with its verb: `the messages have at least`."""
        # LiteLLM and what is built on it know a context overflow by the first words only.
        super().__init__(
            f"This model's maximum context length is {n_ctx} tokens, but {what} {n_tokens} tokens. "
            "Shorten the input or serve with a larger --ctx-size.",
            param=param,
            extra={"n_prompt_tokens": n_tokens, "n_ctx": n_ctx},
        )


class AuthenticationError(ApiError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"WWW-Authenticate": "Bearer"})


class NotFoundError(ApiError):
    status = 404
    type = "not_found_error"
    code = "not_found"


class MethodNotAllowedError(ApiError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class MediaTypeError(ApiError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class RequestTooLargeError(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"

    def __init__(self, limit_bytes: int, reason: str) -> None:
        super().__init__(f"The request body is larger than the limit of {limit_bytes} bytes ({reason}).")


class BodyTimeoutError(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"

    def __init__(self) -> None:
        # The rest of the body may still come, and must not be taken for the next request.
        super().__init__("The request body came too slowly; send it again.", headers={"Connection": "close"})


class BodyQueueError(ApiError):
    """Other large bodies were being read all the time."""

    status = 429
    type = "rate_limit_error"
    code = "queue_timeout"

    def __init__(self, waited_seconds: float) -> None:
        # The connection: as for BodyTimeoutError.
        super().__init__(
            f"Other large request bodies were being read for {waited_seconds:g} s; try again.",
            headers={"Retry-After": str(_BODY_RETRY_SECONDS), "Connection": "close"},
        )


class QueueFullError(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, capacity: int, retry_after_seconds: int) -> None:
        super().__init__(
            f"The queue of {capacity} waiting requests is full; try again in about {retry_after_seconds} s.",
            headers={"Retry-After": str(retry_after_seconds)},
        )


class QueueTimeoutError(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "queue_timeout"

    def __init__(self, waited_seconds: float, retry_after_seconds: int) -> None:
        super().__init__(
            f"The engine was not free within {waited_seconds:g} s (--queue-timeout); "
            f"try again in about {retry_after_seconds} s.",
            headers={"Retry-After": str(retry_after_seconds)},
        )


class AnswerTimeoutError(ApiError):
    """The answer was not complete in time. To try again would take the engine as long once more."""

    status = 504
    type = "server_error"
    code = "timeout"

    def __init__(self, limit_seconds: float) -> None:
        super().__init__(
            f"The answer was not complete within {limit_seconds:g} s (--request-timeout); "
            "ask for fewer tokens or send a shorter prompt.",
            headers={"x-should-retry": "false"},
        )


class EngineFullError(ApiError):
    """Too much waits in the engine itself, which is more than the server lets wait by default."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"Retry-After": "1"})


class UnavailableError(ApiError):
    """The server cannot take the request now. Codes: loading, draining, engine_restarting, engine_dead,
    too_many_connections."""

    status = 503
    type = "unavailable_error"

    def __init__(self, message: str, *, code: str, retry_after_seconds: int) -> None:
        super().__init__(message, code=code, headers={"Retry-After": str(retry_after_seconds)})


class ServerError(ApiError):
    """500 of a known kind. After generation began a retry would double the work, so it is discouraged."""

    def __init__(self, message: str, *, code: str, generation_began: bool = False) -> None:
        headers = {"x-should-retry": "false"} if generation_began else {}
        super().__init__(message, code=code, headers=headers)


class InsufficientMemoryError(ApiError):
    status = 503
    type = "server_error"
    code = "insufficient_memory"


class ClientGoneError(ApiError):
    """The client left; nobody reads the answer, the status is for logs and metrics only."""

    status = CLIENT_GONE_STATUS
    type = "client_gone"
    code = "client_gone"

    def __init__(self) -> None:
        super().__init__("The client closed the connection.")


@dataclass(frozen=True)
class ErrorReply:
    """What goes on the wire."""

    status: int
    error: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.error}


def to_reply(error: BaseException) -> ErrorReply:
    """Maps any exception to the answer; what is not known becomes a 500 that tells nothing of the inside."""
    api_error = to_api_error(error)
    body = {
        "message": api_error.message,
        "type": api_error.type,
        "param": api_error.param,
        "code": api_error.code,
        **api_error.extra,
    }
    return ErrorReply(api_error.status, body, api_error.headers)


def to_api_error(error: BaseException) -> ApiError:
    match error:
        case ApiError():
            return error
        case EngineDiedError():
            return ServerError(error.message, code="engine_died", generation_began=error.generation_began)
        case EngineStoppingError():
            return draining()
        case EngineUnavailableError():
            return unavailable(error.state, error.message)
        case TooLongForEngineError():
            return RequestTooLargeError(error.limit_bytes, "what the engine takes at once")
        case QueryError():
            return from_failed(error.reply, generation_began=False)
        case EngineError():
            return ServerError(error.message, code="engine_error")
        case RequestValidationError():
            return from_validation(error.errors())
        case HTTPException():
            return _from_http(error)
        case _:
            return ServerError(
                "Internal server error; the log has details under the request id.", code="internal_error"
            )


def unavailable(state: EngineState, detail: str) -> UnavailableError:
    """The 503 for an engine in `state`."""
    suffix = f" ({detail})" if detail else ""
    if state is EngineState.DEAD:
        return UnavailableError(
            f"The engine has stopped for good{suffix}.", code="engine_dead", retry_after_seconds=30
        )
    if state in (EngineState.STARTING, EngineState.LOADING):
        return UnavailableError(f"The model is being loaded{suffix}.", code="loading", retry_after_seconds=2)
    return UnavailableError(
        f"The engine is being restarted{suffix}.", code="engine_restarting", retry_after_seconds=2
    )


def draining() -> UnavailableError:
    """The 503 of a server that takes no more requests."""
    return UnavailableError(
        "The server is shutting down.", code="draining", retry_after_seconds=_DRAINING_RETRY_SECONDS
    )


def shut_down(*, generation_began: bool) -> ServerError:
    """The 500 of an answer that the end of the server has cut."""
    return ServerError(
        "The server was shut down before the answer was complete.",
        code="shutdown",
        generation_began=generation_began,
    )


_CLIENT_CODES = frozenset(
    {
        ContextLengthError.code,
        "invalid_grammar",
        "invalid_schema",
        "invalid_value",
        "template_error",
        "unsupported",
    }
)
"""What the engine calls that which the client can mend."""


def from_failed(event: Failed | QueryFailed, *, generation_began: bool) -> ApiError:
    """What the engine said of one request. A code unknown to this side is the server's fault (500)."""
    match event.code:
        case "loading":
            return unavailable(EngineState.LOADING, "")
        case "queue_full":
            return EngineFullError(event.message)
        case InsufficientMemoryError.code:
            return InsufficientMemoryError(event.message, param=event.param)
    if event.code not in _CLIENT_CODES:
        code = ServerError.code if event.code == "internal" else event.code
        return ServerError(event.message, code=code, generation_began=generation_began)
    # The engine's own words, if clients know a context overflow by them.
    if event.code == ContextLengthError.code and "maximum context length is" not in event.message:
        return ContextLengthError(
            "the input has", n_tokens=event.n_prompt_tokens, n_ctx=event.n_ctx, param=event.param
        )
    extra: dict[str, Any] = {}
    if event.code == ContextLengthError.code:
        extra = {"n_prompt_tokens": event.n_prompt_tokens, "n_ctx": event.n_ctx}
    return InvalidRequestError(event.message, code=event.code, param=event.param, extra=extra)


def _from_http(error: HTTPException) -> ApiError:
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return NotFoundError("There is no such route.", headers=headers)
    if error.status_code == 405:
        return MethodNotAllowedError("The route does not answer this method.", headers=headers)
    known = InvalidRequestError if error.status_code < 500 else ApiError
    mapped = known(str(error.detail), headers=headers)
    mapped.status = error.status_code
    return mapped


_VALIDATION_CODES = {"missing": "missing_required_parameter", "invalid_schema": "invalid_schema"}


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The answer to pydantic's list of errors: the first one, named by its field."""
    first = errors[0]
    location = [part for part in first["loc"] if part != "body"]
    param = format_param(location) or None
    message = str(first["msg"]).removeprefix("Value error, ")
    code = _VALIDATION_CODES.get(first["type"], "invalid_value")
    where = f"Invalid value for `{param}`: " if param else "Invalid request: "
    if first["type"] == "missing":
        where, message = "", f"The field `{param}` is required."
    return InvalidRequestError(where + message, code=code, param=param)


def format_param(location: Sequence[int | str]) -> str:
    """`("messages", 0, "content")` → `messages[0].content`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
