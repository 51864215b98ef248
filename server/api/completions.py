"""`POST /v1/completions`, streamed and whole."""

from __future__ import annotations

import logging
import time
import uuid

from fastapi import APIRouter, Request, Response

from s2moe.engine.messages import Detokenize, Detokenized
from s2moe.server.answering import Answering
from s2moe.server.api.body import read_model
from s2moe.server.asking import Asking, new_query_id
from s2moe.server.chat_job import check_model
from s2moe.server.completion_job import API, completion_job
from s2moe.server.engine_client import EngineError
from s2moe.server.errors import ApiError, to_api_error
from s2moe.server.openapi import request_body
from s2moe.server.schema.completions import Completion, CompletionRequest
from s2moe.server.schema.error import error_responses
from s2moe.server.stream.text_answer import TextAnswer
from s2moe.server.stream.text_chunks import TextChunkEncoder
from s2moe.server.stream.text_completion import TextCompletionBuilder

_log = logging.getLogger(__name__)


def router(answering: Answering, asking: Asking) -> APIRouter:
    routes = APIRouter()
    settings = answering.settings

    async def create(request: Request) -> Response:
        body = await read_model(request, CompletionRequest)
        check_model(answering, body.model)
        if settings.log_prompts:
            _log.info("completion request", extra={"fields": {"prompt": body.prompt}})
        streamed = bool(body.stream)
        try:
            job = completion_job(body, answering.client.model)
            echoes = await _echoes(request, body, asking) if body.echo else []
        except (ApiError, EngineError) as error:
            raise answering.refuse(request, API, stream=streamed, error=to_api_error(error)) from None
        answer = TextAnswer(
            completion_id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=answering.alias,
            n_prompts=len(body.prompt),
            n_per_prompt=body.n_choices_per_prompt,
            echoes=echoes,
        )
        include_usage, with_logprobs = body.wants_usage_chunk, body.logprobs is not None
        del body  # may be long, and what follows may wait
        if not streamed:
            builder = TextCompletionBuilder(
                answer, fingerprint=lambda: answering.fingerprint, with_logprobs=with_logprobs
            )
            return await answering.whole(request, job, builder)
        return await answering.stream(
            request,
            job,
            lambda: TextChunkEncoder(
                answer, system_fingerprint=answering.fingerprint, include_usage=include_usage
            ),
        )

    for path, shown in (("/v1/completions", True), ("/completions", False)):
        routes.add_api_route(
            path,
            create,
            methods=["POST"],
            summary="Continue text",
            response_model=Completion,
            responses=error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
            | {200: {"content": {"text/event-stream": {}}, "description": "The answer, or its chunks"}},
            openapi_extra=request_body(CompletionRequest),
            include_in_schema=shown,
        )
    return routes


async def _echoes(request: Request, body: CompletionRequest, asking: Asking) -> list[str]:
    """The text of each prompt; of tokens, the engine knows it."""

    async def text_of_tokens(tokens: list[int]) -> str:
        reply = await asking.reply(Detokenize(query_id=new_query_id(), tokens=tokens), Detokenized)
        return reply.text.decode(errors="replace")

    async def texts() -> list[str]:
        return [each if isinstance(each, str) else await text_of_tokens(each) for each in body.prompt]

    if all(isinstance(each, str) for each in body.prompt):
        return await texts()
    return await asking.attend(request, texts())
