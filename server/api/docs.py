"""`GET /docs`: the OpenAPI document in Swagger UI, with files of this server and of a Python package alone.

There is nothing secret in the files, so they are open without a key, as those of the chat page are. The
document that they show is not: the page asks for the key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.staticfiles import StaticFiles

from s2moe.server.api.page import MEDIA_TYPES, SECURITY_HEADERS, PageFile
from s2moe.server.errors import NotFoundError

_FOLDER: Final = Path(__file__).parents[1] / "docs"
_INDEX: Final = "index.html"
OWN_FILES: Final = (_INDEX, "docs.css", "docs.js", "icon.svg")
SWAGGER_UI: Final = ("fastapi_offline", "static")
"""The package whose folder has Swagger UI as its makers publish it."""
SWAGGER_UI_FILES: Final = ("swagger-ui-bundle.js", "swagger-ui.css")
DOCS_ROUTES: Final = ("/docs", "/docs/{name}")
DOCS_PATHS: Final = frozenset({"/docs", *(f"/docs/{name}" for name in (*OWN_FILES, *SWAGGER_UI_FILES))})


def router() -> APIRouter:
    """Raises OSError or AssertionError when a file or the package is missing: the installation is broken."""
    routes = APIRouter()
    own = {name: PageFile(_FOLDER / name) for name in OWN_FILES}
    # not kept in memory, as 1.7 MB that nobody may ever ask for
    swagger_ui = StaticFiles(packages=[SWAGGER_UI])

    async def index(request: Request) -> Response:
        return own[_INDEX].response(request.headers)

    async def file(request: Request, name: str) -> Response:
        if name in own:
            return own[name].response(request.headers)
        if name not in SWAGGER_UI_FILES:
            raise NotFoundError("There is no such route.")
        response = await swagger_ui.get_response(name, request.scope)
        response.headers.update(SECURITY_HEADERS)
        if response.status_code == 200:
            # what the system's table of types says of JavaScript differs
            response.headers["Content-Type"] = MEDIA_TYPES[Path(name).suffix]
        return response

    methods = ["GET", "HEAD"]
    routes.add_api_route(DOCS_ROUTES[0], index, methods=methods, include_in_schema=False)
    routes.add_api_route(DOCS_ROUTES[1], file, methods=methods, include_in_schema=False)
    return routes
