"""`POST /v1/messages` (Anthropic), streamed and whole, and `/v1/messages/count_tokens`.

The headers `anthropic-version` and `anthropic-beta` are accepted and say nothing to this server.
"""

from __future__ import annotations

import uuid

import msgspec
from fastapi import APIRouter, Request, Response

from s2moe.server.answering import Answering
from s2moe.server.api.body import read_model
from s2moe.server.api.converted import answer, count_tokens, job_of
from s2moe.server.asking import Asking
from s2moe.server.convert.messages import to_chat
from s2moe.server.logs import request_id_var
from s2moe.server.openapi import request_body
from s2moe.server.schema.message_answer import MessageAnswer, message_error_responses
from s2moe.server.schema.messages import CountTokensRequest, MessagesRequest, TokenCount
from s2moe.server.stream.message_answer import MessageBuilder, message_of
from s2moe.server.stream.message_events import MessageEventEncoder

API = "messages"


def router(answering: Answering, asking: Asking) -> APIRouter:
    routes = APIRouter()

    async def create(request: Request) -> Response:
        body = await read_model(request, MessagesRequest)
        form, streamed = to_chat(body), bool(body.stream)
        job = job_of(answering, request, form, API, stream=streamed)
        message = message_of(f"msg_{uuid.uuid4().hex}", answering.alias)
        names, request_id = form.names, request_id_var.get()
        del body, form  # may be long, and what follows may wait
        response = await answer(
            answering,
            request,
            job,
            names,
            builder=None if streamed else MessageBuilder(message),
            make_encoder=lambda: MessageEventEncoder(message, names=names, request_id=request_id),
        )
        return _with_request_id(response)

    async def count(request: Request) -> Response:
        form = to_chat(await read_model(request, CountTokensRequest))
        value = {"input_tokens": await count_tokens(answering, asking, request, form)}
        return _with_request_id(Response(msgspec.json.encode(value), media_type="application/json"))

    for prefix, shown in (("/v1", True), ("", False)):
        routes.add_api_route(
            f"{prefix}/messages",
            create,
            methods=["POST"],
            summary="Answer a conversation (Anthropic Messages)",
            response_model=MessageAnswer,
            responses=message_error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
            | {200: {"content": {"text/event-stream": {}}, "description": "The message, or its events"}},
            openapi_extra=request_body(MessagesRequest),
            include_in_schema=shown,
        )
        routes.add_api_route(
            f"{prefix}/messages/count_tokens",
            count,
            methods=["POST"],
            summary="Number of prompt tokens of a message",
            response_model=TokenCount,
            responses=message_error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503, 504),
            openapi_extra=request_body(CountTokensRequest),
            include_in_schema=shown,
        )
    return routes


def _with_request_id(response: Response) -> Response:
    """Under the name that Anthropic's clients read."""
    if (request_id := request_id_var.get()) is not None:
        response.headers["request-id"] = request_id
    return response
