"""The ASGI application, put together from its parts; it owns nothing and starts nothing."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from s2moe.server.admission import Admission
from s2moe.server.answering import Answering
from s2moe.server.api import (
    chat,
    completions,
    docs,
    embeddings,
    health,
    messages,
    metrics,
    models,
    page,
    props,
    responses,
    tokenize,
)
from s2moe.server.api import version as version_api
from s2moe.server.asking import Asking
from s2moe.server.engine_client import EngineClient, EngineError
from s2moe.server.error_dialects import error_response
from s2moe.server.errors import ApiError
from s2moe.server.metrics import Metrics
from s2moe.server.middleware import ApiKey, BodyReading, LastResort, RequestContext
from s2moe.server.openapi import add_body_schemas
from s2moe.server.schema.chat import ChatRequest
from s2moe.server.schema.completions import CompletionRequest
from s2moe.server.schema.embeddings import EmbeddingsRequest
from s2moe.server.schema.messages import CountTokensRequest, MessagesRequest
from s2moe.server.schema.responses import ResponsesRequest
from s2moe.server.schema.tokenize import DetokenizeRequest, TokenizeRequest
from s2moe.server.settings import Settings

BODY_MODELS: Final = (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)
"""Of all routes: `openapi.request_body` refers to them."""


def create_app(settings: Settings, client: EngineClient, registry: Metrics, admission: Admission) -> FastAPI:
    """Raises SettingsError when the API key cannot be read."""
    app = FastAPI(
        title="s2moe",
        version=version("s2moe"),
        summary="OpenAI-compatible inference server for Mixture-of-Experts models",
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere; see api.docs
        redoc_url=None,
        redirect_slashes=False,
    )
    answering = Answering(settings, client, registry, admission)
    # apart, since vectors take long and tokens do not
    asking, asking_for_vectors = (
        Asking(
            client,
            registry,
            admission,
            capacity=settings.queue_size,
            timeout_seconds=settings.request_timeout,
        )
        for _ in range(2)
    )
    for routes in (
        chat.router(answering),
        completions.router(answering, asking),
        responses.router(answering, asking),
        messages.router(answering, asking),
        embeddings.router(answering, asking_for_vectors, registry),
        tokenize.router(answering, asking),
        props.router(settings, client),
        models.router(client, alias=settings.model_alias),
        health.router(client, admission),
        metrics.router(client, registry),
        version_api.router(client),
        docs.router(),
        *([page.router()] if settings.page else []),
    ):
        for route in routes.routes:
            if isinstance(route, APIRoute):
                registry.add_route(route.path, route.methods or ())
        app.include_router(routes)
    for kind in (ApiError, EngineError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _on_error)
    _add_middleware(app, settings, client, registry)
    add_body_schemas(app, BODY_MODELS)
    return app


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(error, request.scope["path"])


def _add_middleware(app: FastAPI, settings: Settings, client: EngineClient, registry: Metrics) -> None:
    # The last one added is the outermost.
    app.add_middleware(BodyReading, client=client, max_bytes=settings.max_body_size)
    if (key := settings.read_api_key()) is not None:
        app.add_middleware(ApiKey, key=key)
    app.add_middleware(LastResort)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST"],
            # Whatever is asked for: SDKs send a changing set of X-Stainless-* headers.
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", "x-should-retry"],
        )
    app.add_middleware(RequestContext, metrics=registry)
