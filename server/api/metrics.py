"""`GET /metrics`: Prometheus text, answered without the engine."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from s2moe.server.engine_client import EngineClient
from s2moe.server.metrics import Metrics
from s2moe.server.schema.error import error_responses


def router(client: EngineClient, metrics: Metrics) -> APIRouter:
    routes = APIRouter()

    async def scrape() -> Response:
        metrics.show_engine(client.model, heartbeat_age_seconds=client.heartbeat_age_seconds)
        # Some milliseconds of text building, which in the event loop would delay a token.
        text = await asyncio.to_thread(metrics.render)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    routes.add_api_route(
        "/metrics",
        scrape,
        methods=["GET"],
        response_class=Response,
        responses=error_responses(401) | {200: {"content": {"text/plain": {}}}},
        summary="Prometheus metrics",
    )
    return routes
