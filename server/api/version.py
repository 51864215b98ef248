"""`GET /version`."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter

from s2moe.server.engine_client import EngineClient
from s2moe.server.schema.error import error_responses
from s2moe.server.schema.version import Version


def router(client: EngineClient) -> APIRouter:
    routes = APIRouter()

    async def get_version() -> Version:
        fingerprint = client.model.system_fingerprint if client.model is not None else None
        return Version(version=version("s2moe"), system_fingerprint=fingerprint)

    routes.add_api_route(
        "/version",
        get_version,
        methods=["GET"],
        responses=error_responses(401),
        summary="Versions of the server and its engine",
    )
    return routes
