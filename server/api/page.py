"""`GET /`: the chat page. A fixed table of files, read at start; there is nothing secret in them, so they are
open without a key, while the API that the page uses is not."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers

from s2moe.server.errors import NotFoundError

_FOLDER: Final = Path(__file__).parents[1] / "page"
_INDEX: Final = "index.html"
MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES: Final = (
    _INDEX,
    "announcer.js",
    "api.js",
    "chat.js",
    "dom.js",
    "figures.js",
    "format.js",
    "icon.svg",
    "main.js",
    "markdown.js",
    "metrics.js",
    "poller.js",
    "settings.js",
    "sse.js",
    "style.css",
    "turn.js",
    "turn_view.js",
)
PAGE_ROUTES: Final = ("/", "/page/{name}")
PAGE_PATHS: Final = frozenset({"/", *(f"/page/{name}" for name in FILES)})
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Nothing from elsewhere, nothing inline, nothing framed; text cannot become markup or code, since no trusted
type is ever made."""
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageFile:
    """One file of the page, as it is and compressed."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when it cannot be read: the installation is incomplete."""
        self._bytes = path.read_bytes()
        self._compressed = gzip.compress(self._bytes, mtime=0)
        self._type = MEDIA_TYPES[path.suffix]
        self._digest = hashlib.sha256(self._bytes).hexdigest()[:24]

    def response(self, asked: Headers) -> Response:
        compress = "gzip" in asked.get("accept-encoding", "")
        tag = f'"{self._digest}{"-gzip" if compress else ""}"'
        headers = {**SECURITY_HEADERS, "Vary": "Accept-Encoding", "ETag": tag}
        if compress:
            headers["Content-Encoding"] = "gzip"
        known = [tag.strip().removeprefix("W/") for tag in asked.get("if-none-match", "").split(",")]
        if headers["ETag"] in known:
            headers.pop("Content-Encoding", None)
            return Response(status_code=304, headers=headers)
        body = self._compressed if compress else self._bytes
        return Response(body, headers=headers, media_type=self._type)


def router() -> APIRouter:
    """Raises OSError when a file of the page is missing."""
    routes = APIRouter()
    files = {name: PageFile(_FOLDER / name) for name in FILES}

    async def index(request: Request) -> Response:
        return files[_INDEX].response(request.headers)

    async def file(request: Request, name: str) -> Response:
        if name not in files:
            raise NotFoundError("There is no such route.")
        return files[name].response(request.headers)

    methods = ["GET", "HEAD"]
    routes.add_api_route("/", index, methods=methods, include_in_schema=False)
    routes.add_api_route("/page/{name}", file, methods=methods, include_in_schema=False)
    return routes
