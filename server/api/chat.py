"""`POST /v1/chat/completions`, streamed and whole."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from s2moe.engine.messages import Generate, ModelInfo
from s2moe.server.answering import Answering, Job
from s2moe.server.api.body import read_model
from s2moe.server.errors import ApiError, InvalidRequestError, NotFoundError
from s2moe.server.schema.chat import ChatCompletion, ChatRequest
from s2moe.server.schema.error import error_responses
from s2moe.server.stream.chat_chunks import ChatChunkEncoder
from s2moe.server.stream.chat_completion import ChatCompletionBuilder

API = "chat"
_log = logging.getLogger(__name__)


def router(answering: Answering) -> APIRouter:
    routes = APIRouter()
    client, settings, alias = answering.client, answering.settings, answering.alias

    async def create(request: Request) -> Response:
        body = await read_model(request, ChatRequest)
        if (problem := body.unsupported_field()) is not None:
            param, message = problem
            raise InvalidRequestError(f"Invalid value for `{param}`: {message}.", param=param)
        check_model(answering, body.model)
        streamed = bool(body.stream)
        if settings.log_prompts:
            messages = [message.to_wire() for message in body.messages]
            _log.info("chat request", extra={"fields": {"messages": messages}})
        if (error := too_long(body, client.model)) is not None:
            raise answering.refuse(request, API, stream=streamed, error=error)
        job = Job(API, [to_generate(body)])
        include_usage, created = body.wants_usage_chunk, int(time.time())
        del body  # may be long, and what follows may wait
        if not streamed:
            return await answering.whole(
                request,
                job,
                ChatCompletionBuilder(
                    completion_id=completion_id(),
                    created=created,
                    model=alias,
                    fingerprint=lambda: answering.fingerprint,
                ),
            )
        return await answering.stream(
            request,
            job,
            lambda: ChatChunkEncoder(
                completion_id=completion_id(),
                created=created,
                model=alias,
                system_fingerprint=answering.fingerprint,
                include_usage=include_usage,
            ),
        )

    for path, shown in (("/v1/chat/completions", True), ("/chat/completions", False)):
        routes.add_api_route(
            path,
            create,
            methods=["POST"],
            summary="Answer a conversation",
            response_model=ChatCompletion,
            responses=error_responses(400, 401, 404, 413, 429, 500, 503)
            | {200: {"content": {"text/event-stream": {}}, "description": "The answer, or its chunks"}},
            openapi_extra={"requestBody": _REQUEST_BODY},
            include_in_schema=shown,
        )
    return routes


_REQUEST_BODY: dict[str, Any] = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ChatRequest"}}},
}


def check_model(answering: Answering, model: str | None) -> None:
    """Raises NotFoundError where only the served model's name is allowed."""
    if answering.settings.strict_model and model not in (None, answering.alias):
        raise NotFoundError(
            f"The model `{model}` is not served here; this server has `{answering.alias}`.",
            code="model_not_found",
            param="model",
        )


def too_long(body: ChatRequest, model: ModelInfo | None) -> ApiError | None:
    """The error for messages that do not fit the context even in the longest tokens. The engine would say the
    same, but until then they would take memory in the queue."""
    if model is None or not model.longest_piece_bytes:
        return None
    n_bytes = sum(len(message.to_wire()["content"].encode()) for message in body.messages)
    n_tokens = n_bytes // model.longest_piece_bytes
    if n_tokens < model.n_ctx:
        return None
    message = (
        f"This model's maximum context length is {model.n_ctx} tokens, but the messages have at least "
        f"{n_tokens} tokens. Shorten them or serve with a larger --ctx-size."
    )
    return InvalidRequestError(
        message,
        code="context_length_exceeded",
        param="messages",
        extra={"n_prompt_tokens": n_tokens, "n_ctx": model.n_ctx},
    )


def to_generate(body: ChatRequest) -> Generate:
    """The engine's form of the request. Its id is ours, not the client's, so that it is unique."""
    return Generate(
        request_id=uuid.uuid4().hex,
        messages_json=msgspec.json.encode([message.to_wire() for message in body.messages]),
        sampling=body.to_sampling(),
        max_tokens=body.token_limit,
        stop=body.stop_strings,
        speculation=body.to_speculation(),
    )


def completion_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"
