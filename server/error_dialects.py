"""The one place where an error becomes an HTTP answer in the protocol of the route that it belongs to."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import JSONResponse

from s2moe.server.errors import ErrorReply, to_reply
from s2moe.server.logs import request_id_var

_ANTHROPIC_ROUTES: Final = ("/v1/messages", "/messages")
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""By status; other ones are invalid_request_error below 500, and api_error from there on."""


def error_response(error: BaseException, path: str) -> JSONResponse:
    """The answer to a request of `path` that ended with `error`, wherever it did."""
    reply = to_reply(error)
    if not speaks_anthropic(path):
        return JSONResponse(reply.body, reply.status, reply.headers)
    request_id = request_id_var.get()
    headers = dict(reply.headers) if request_id is None else {**reply.headers, "request-id": request_id}
    return JSONResponse(anthropic_body(reply, request_id), reply.status, headers)


def speaks_anthropic(path: str) -> bool:
    """Whether errors of this path have Anthropic's shape: those of its routes and of what is missing below
    them."""
    return any(path == route or path.startswith(f"{route}/") for route in _ANTHROPIC_ROUTES)


def anthropic_body(reply: ErrorReply, request_id: str | None) -> dict[str, Any]:
    """https://docs.anthropic.com/en/api/errors"""
    message = reply.error["message"]
    if reply.error["code"] == "context_length_exceeded" and "n_ctx" in reply.error:
        # Claude Code makes its conversation shorter when it reads these words.
        n_tokens, limit = reply.error["n_prompt_tokens"], reply.error["n_ctx"]
        message = f"prompt is too long: {n_tokens} tokens > {limit} maximum. {message}"
    kind = "invalid_request_error" if reply.status < 500 else "api_error"
    error = {"type": _ANTHROPIC_TYPES.get(reply.status, kind), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}
