"""`/docs`: Swagger UI without any other host."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import pytest
from fake_engine import FakeEngine
from server_rig import ServerRig, StartServer

from s2moe.server.api.docs import OWN_FILES, SWAGGER_UI_FILES
from s2moe.server.api.page import CONTENT_SECURITY_POLICY

KEY = "secret-key"
TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
STRICT_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def named_files(html: str) -> list[str]:
    return re.findall(r"<(?:script|link|img|iframe)\b[^>]*?\s(?:src|href)=\"([^\"]+)\"", html)


async def test_page_names_files_of_this_server_alone_and_they_are_there(rig: ServerRig) -> None:
    reply = await rig.http.get("/docs")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert STRICT_HEADERS.items() <= dict(reply.headers).items()
    assert re.findall(r"https?:|[\"'(]//\w", reply.text) == []
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", reply.text) == []
    files = named_files(reply.text)
    assert {f"docs/{name}" for name in SWAGGER_UI_FILES} <= set(files)
    assert len(files) == len(OWN_FILES) - 1 + len(SWAGGER_UI_FILES)
    for file in files:
        asset = await rig.http.get(urljoin("/docs", file))
        assert asset.status_code == 200, file
        assert asset.headers["content-type"] == TYPES[file.rpartition(".")[2]]
        assert STRICT_HEADERS.items() <= dict(asset.headers).items()
        assert len(asset.content) > 100
    assert (await rig.http.get("/openapi.json")).status_code == 200


async def test_files_of_swagger_ui_are_those_of_version_5(rig: ServerRig) -> None:
    script = (await rig.http.get("/docs/swagger-ui-bundle.js")).text
    assert re.search(r'PACKAGE_VERSION:"5\.\d+\.\d+"', script)
    style = (await rig.http.get("/docs/swagger-ui.css")).text
    assert re.findall(r"@import|url\(\"?(?!\"?data:)", style) == []


@pytest.mark.parametrize("name", ["swagger-ui.css", "docs.js"])
async def test_file_is_not_sent_again_and_head_has_no_body(rig: ServerRig, name: str) -> None:
    whole = await rig.http.get(f"/docs/{name}")
    head = await rig.http.head(f"/docs/{name}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    again = await rig.http.get(f"/docs/{name}", headers={"if-none-match": whole.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert STRICT_HEADERS.items() <= dict(again.headers).items()


async def test_files_are_open_and_the_document_is_not_where_a_key_is_set(start_server: StartServer) -> None:
    rig = await start_server(api_key=KEY)
    for path in ("/docs", *(f"/docs/{name}" for name in (*OWN_FILES, *SWAGGER_UI_FILES))):
        assert (await rig.http.get(path)).status_code == 200, path
    for path in ("/openapi.json", "/docs/", "/docs/redoc.standalone.js", "/redoc"):
        assert (await rig.http.get(path)).status_code == 401, path
    for method in ("GET", "HEAD"):
        reply = await rig.http.request(method, "/openapi.json", headers={"authorization": f"Bearer {KEY}"})
        assert reply.status_code == 200


async def test_nothing_else_of_the_package_can_be_read(rig: ServerRig) -> None:
    for path in (
        "/docs/redoc.standalone.js",
        "/docs/favicon.png",
        "/docs/..%2fcore.py",
        "/docs/%2e%2e/core.py",
        "/docs/oauth2-redirect",
        "/docs/",
        "/redoc",
    ):
        reply = await rig.http.get(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found"), path


async def test_docs_are_there_without_the_chat_page(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(), page=False)
    html = (await rig.http.get("/docs")).text
    for file in named_files(html):
        assert (await rig.http.get(urljoin("/docs", file))).status_code == 200
