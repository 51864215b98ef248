"""`GET /health`: 200 when a request would be taken, 503 with the reason when not. Open without a key."""

from __future__ import annotations

from itertools import product
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from s2moe.server.admission import Admission
from s2moe.server.engine_client import EngineClient, EngineState
from s2moe.server.schema.health import Health

_RETRY_AFTER_SECONDS = 2
_STATUS: dict[EngineState, Literal["ok", "loading", "restarting", "dead"]] = {
    EngineState.STARTING: "loading",
    EngineState.LOADING: "loading",
    EngineState.READY: "ok",
    EngineState.BUSY: "ok",
    EngineState.RESTARTING: "restarting",
    EngineState.DEAD: "dead",
}


def router(client: EngineClient, admission: Admission) -> APIRouter:
    routes = APIRouter()

    async def health() -> JSONResponse:
        if admission.draining:
            body = Health(status="draining", reason="the server is shutting down")
        else:
            status = _STATUS[client.state]
            reason = None if status == "ok" else client.state_detail or status
            body = Health(status=status, reason=reason)
        if body.status == "ok":
            return JSONResponse(body.model_dump(exclude_none=True))
        return JSONResponse(body.model_dump(), 503, {"Retry-After": str(_RETRY_AFTER_SECONDS)})

    for path, method in product(("/health", "/v1/health"), ("GET", "HEAD")):
        routes.add_api_route(
            path,
            health,
            methods=[method],
            response_model=Health,
            responses={503: {"model": Health}},
            summary="Whether the server takes requests",
            include_in_schema=(path, method) == ("/health", "GET"),
        )
    return routes
