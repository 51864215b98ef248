"""`POST /v1/chat/completions`, streamed and whole."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response

from s2moe.server.answering import Answering
from s2moe.server.api.body import read_model
from s2moe.server.chat_job import chat_job
from s2moe.server.errors import ApiError
from s2moe.server.openapi import request_body
from s2moe.server.schema.chat import ChatCompletion, ChatRequest
from s2moe.server.schema.error import error_responses
from s2moe.server.stream.chat_chunks import ChatChunkEncoder
from s2moe.server.stream.chat_completion import REASONING_NAMES, ChatCompletionBuilder

API = "chat"


def router(answering: Answering) -> APIRouter:
    routes = APIRouter()
    alias, wanted = answering.alias, answering.settings.reasoning_fields
    reasoning_names = REASONING_NAMES if wanted == "both" else (wanted,)

    async def create(request: Request) -> Response:
        body = await read_model(request, ChatRequest)
        streamed = bool(body.stream)
        try:
            job = chat_job(answering, body, API)
        except ApiError as error:
            raise answering.refuse(request, API, stream=streamed, error=error) from None
        completion_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        include_usage, return_progress = body.wants_usage_chunk, bool(body.return_progress)
        logprobs, n_choices = bool(body.logprobs), body.n_choices
        del body  # may be long, and what follows may wait
        if not streamed:
            return await answering.whole(
                request,
                job,
                ChatCompletionBuilder(
                    completion_id=completion_id,
                    created=created,
                    model=alias,
                    fingerprint=lambda: answering.fingerprint,
                    logprobs=logprobs,
                    reasoning_names=reasoning_names,
                ),
            )
        return await answering.stream(
            request,
            job,
            lambda: ChatChunkEncoder(
                completion_id=completion_id,
                created=created,
                model=alias,
                system_fingerprint=answering.fingerprint,
                include_usage=include_usage,
                n_choices=n_choices,
                return_progress=return_progress,
                reasoning_names=reasoning_names,
            ),
        )

    for path, shown in (("/v1/chat/completions", True), ("/chat/completions", False)):
        routes.add_api_route(
            path,
            create,
            methods=["POST"],
            summary="Answer a conversation",
            response_model=ChatCompletion,
            responses=error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
            | {200: {"content": {"text/event-stream": {}}, "description": "The answer, or its chunks"}},
            openapi_extra=request_body(ChatRequest),
            include_in_schema=shown,
        )
    return routes
