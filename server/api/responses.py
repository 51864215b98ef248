"""`POST /v1/responses` (OpenAI), streamed and whole, and `/v1/responses/input_tokens`."""

from __future__ import annotations

import time
import uuid

import msgspec
from fastapi import APIRouter, Request, Response

from s2moe.server.answering import Answering
from s2moe.server.api.body import read_model
from s2moe.server.api.converted import answer, count_tokens, job_of
from s2moe.server.asking import Asking
from s2moe.server.convert.responses import to_chat
from s2moe.server.errors import InvalidRequestError
from s2moe.server.openapi import request_body
from s2moe.server.schema.error import error_responses
from s2moe.server.schema.response_object import ResponseInputTokens, ResponseObject
from s2moe.server.schema.responses import ResponsesRequest
from s2moe.server.stream.response_events import ResponseEventEncoder
from s2moe.server.stream.response_object import ResponseBuilder, head_of

API = "responses"


def router(answering: Answering, asking: Asking) -> APIRouter:
    routes = APIRouter()

    async def create(request: Request) -> Response:
        body = await _read(request)
        form, streamed = to_chat(body), bool(body.stream)
        job = job_of(answering, request, form, API, stream=streamed)
        response_id = f"resp_{uuid.uuid4().hex}"
        head = head_of(body, response_id=response_id, created=int(time.time()), model=answering.alias)
        summarize = body.reasoning is not None and body.reasoning.summary is not None
        logprobs = body.wants_logprobs
        names = form.names
        del body, form  # may be long, and what follows may wait
        return await answer(
            answering,
            request,
            job,
            names,
            builder=None if streamed else ResponseBuilder(head, summarize=summarize),
            make_encoder=lambda: ResponseEventEncoder(
                head, names=names, summarize=summarize, logprobs=logprobs
            ),
        )

    async def count(request: Request) -> Response:
        n_tokens = await count_tokens(answering, asking, request, to_chat(await _read(request)))
        value = {"object": "response.input_tokens", "input_tokens": n_tokens}
        return Response(msgspec.json.encode(value), media_type="application/json")

    for prefix, shown in (("/v1", True), ("", False)):
        routes.add_api_route(
            f"{prefix}/responses",
            create,
            methods=["POST"],
            summary="Answer a conversation (Responses)",
            response_model=ResponseObject,
            responses=error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
            | {200: {"content": {"text/event-stream": {}}, "description": "The response, or its events"}},
            openapi_extra=request_body(ResponsesRequest),
            include_in_schema=shown,
        )
        routes.add_api_route(
            f"{prefix}/responses/input_tokens",
            count,
            methods=["POST"],
            summary="Number of input tokens of a response",
            response_model=ResponseInputTokens,
            responses=error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503, 504),
            openapi_extra=request_body(ResponsesRequest),
            include_in_schema=shown,
        )
    return routes


async def _read(request: Request) -> ResponsesRequest:
    body = await read_model(request, ResponsesRequest)
    if (problem := body.unsupported_field()) is not None:
        param, reason = problem
        raise InvalidRequestError(f"Invalid value for `{param}`: {reason}.", param=param)
    return body
