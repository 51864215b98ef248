"""The page's files over HTTP: types, headers, caching, and nothing but these files."""

from __future__ import annotations

import gzip
import re
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from page_server import PageServer

from s2moe.server.api import page

FOLDER = Path(page.__file__).parents[1] / "page"
KEY = "secret-key"
StartServer = Callable[..., PageServer]


def path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


def raw_get(server: PageServer, target: str) -> bytes:
    """An answer to a path as it is: clients would tidy it up."""
    with socket.create_connection(("127.0.0.1", server.rig.port), timeout=5) as connection:
        head = f"GET {target} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode("latin-1"))
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer


def test_table_holds_all_files_of_the_folder() -> None:
    assert sorted(page.FILES) == sorted(path.name for path in FOLDER.iterdir() if path.is_file())


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("index.html", "text/html; charset=utf-8"),
        ("style.css", "text/css; charset=utf-8"),
        ("main.js", "text/javascript; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
    ],
)
def test_files_have_their_types_and_strict_headers(
    start_server: StartServer, name: str, media_type: str
) -> None:
    server = start_server()
    for method in ("GET", "HEAD"):
        reply = httpx.request(method, server.url + path_of(name))
        assert reply.status_code == 200
        assert reply.headers["content-type"] == media_type
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["cache-control"] == "no-cache"
        policy = reply.headers["content-security-policy"].split("; ")
        assert set(policy) >= {
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        }
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert reply.content == (b"" if method == "HEAD" else (FOLDER / name).read_bytes())


def test_every_file_is_served(start_server: StartServer) -> None:
    server = start_server()
    for name in page.FILES:
        assert httpx.get(server.url + path_of(name)).content == (FOLDER / name).read_bytes(), name


def test_unchanged_file_is_not_sent_again(start_server: StartServer) -> None:
    server = start_server()
    for encoding in ("gzip", "identity"):
        asked = {"accept-encoding": encoding}
        tag = httpx.get(f"{server.url}/", headers=asked).headers["etag"]
        for known in (tag, f'"other", W/{tag}'):
            reply = httpx.get(f"{server.url}/", headers={**asked, "if-none-match": known})
            assert (reply.status_code, reply.content, reply.headers["etag"]) == (304, b"", tag)
            assert "content-security-policy" in reply.headers
        reply = httpx.get(f"{server.url}/", headers={**asked, "if-none-match": '"other"'})
        assert reply.status_code == 200


def test_encodings_have_different_tags(start_server: StartServer) -> None:
    server = start_server()
    encodings = ("gzip", "identity")
    replies = [httpx.get(f"{server.url}/", headers={"accept-encoding": each}) for each in encodings]
    assert [reply.headers.get("content-encoding") for reply in replies] == ["gzip", None]
    assert replies[0].headers["etag"] != replies[1].headers["etag"]
    assert all(reply.headers["vary"] == "Accept-Encoding" for reply in replies)


@pytest.mark.parametrize("key", [None, KEY])
def test_nothing_else_can_be_read(start_server: StartServer, key: str | None) -> None:
    server = start_server(api_key=key)
    for target in (
        "/page/",
        "/page/nothing.js",
        "/page/../settings.py",
        "/page/..%2fsettings.py",
        "/page/%2e%2e/settings.py",
        "/page/..%5csettings.py",
        "/page/....//settings.py",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/index.html%00.js",
        "/page/./index.html",
        "/index.html",
        "//page/index.html",
    ):
        answer = raw_get(server, target)
        assert answer.startswith(b"HTTP/1.1 404 "), target
        assert b'"code":"not_found"' in answer, target


def test_page_is_open_where_the_api_asks_for_a_key(start_server: StartServer) -> None:
    server = start_server(api_key=KEY)
    for name in page.FILES:
        assert httpx.get(server.url + path_of(name)).status_code == 200
    for path in ("/page/nothing.js", "/page", "/v1/models", "/metrics", "/props"):
        assert httpx.get(server.url + path).status_code == 401, path
    assert httpx.post(f"{server.url}/v1/chat/completions", json={}).status_code == 401


def test_page_can_be_switched_off(start_server: StartServer) -> None:
    server = start_server(page=False)
    for name in ("index.html", "main.js"):
        assert httpx.get(server.url + path_of(name)).status_code == 404


def test_page_takes_no_other_method(start_server: StartServer) -> None:
    server = start_server()
    assert httpx.post(f"{server.url}/").status_code == 405


def test_page_is_small() -> None:
    sent = sum(len(gzip.compress((FOLDER / name).read_bytes())) for name in page.FILES)
    assert sent < 30_000


def test_nothing_inline_and_nothing_from_elsewhere() -> None:
    html = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\ssrc=)", html) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", html) == []
    for name in page.FILES:
        text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"https?://|[\"'(]//\w", text) == [], name


def test_text_of_the_model_cannot_become_markup_or_code() -> None:
    for name in page.FILES:
        if name.endswith(".js"):
            text = (FOLDER / name).read_text()
            sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser"
            assert re.findall(sinks, text) == [], name


def test_modules_import_files_of_the_table() -> None:
    for name in page.FILES:
        if name.endswith(".js"):
            for imported in re.findall(r'from "\./([^"]+)"', (FOLDER / name).read_text()):
                assert imported in page.FILES, f"{name} imports {imported}"
