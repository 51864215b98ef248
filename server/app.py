"""The ASGI application, put together from its parts; it owns nothing and starts nothing."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from s2moe.server.admission import Admission
from s2moe.server.answering import Answering
from s2moe.server.api import chat, health, metrics, models
from s2moe.server.api import version as version_api
from s2moe.server.engine_client import EngineClient, EngineError
from s2moe.server.errors import ApiError, error_response
from s2moe.server.metrics import Metrics
from s2moe.server.middleware import ApiKey, BodyReading, RequestContext
from s2moe.server.schema.chat import ChatRequest
from s2moe.server.settings import Settings


def create_app(settings: Settings, client: EngineClient, registry: Metrics, admission: Admission) -> FastAPI:
    """Raises SettingsError when the API key cannot be read."""
    app = FastAPI(
        title="s2moe",
        version=version("s2moe"),
        summary="OpenAI-compatible inference server for Mixture-of-Experts models",
        redoc_url=None,
        redirect_slashes=False,
    )
    for routes in (
        chat.router(Answering(settings, client, registry, admission)),
        models.router(client, alias=settings.model_alias),
        health.router(client, admission),
        metrics.router(client, registry),
        version_api.router(client),
    ):
        for route in routes.routes:
            if isinstance(route, APIRoute):
                registry.add_route(route.path, route.methods or ())
        app.include_router(routes)
    for kind in (ApiError, EngineError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _on_error)
    _add_middleware(app, settings, client, registry)
    _add_body_schemas(app)
    return app


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    return error_response(error)


def _add_middleware(app: FastAPI, settings: Settings, client: EngineClient, registry: Metrics) -> None:
    # The last one added is the outermost.
    app.add_middleware(BodyReading, client=client, max_bytes=settings.max_body_size)
    if (key := settings.read_api_key()) is not None:
        app.add_middleware(ApiKey, key=key)
    if settings.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST"],
            # Whatever is asked for: SDKs send a changing set of X-Stainless-* headers.
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestContext, metrics=registry)


def _add_body_schemas(app: FastAPI) -> None:
    """Puts the bodies that handlers read by themselves (`api.body`) into the OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schema = ChatRequest.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas["ChatRequest"] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign]
