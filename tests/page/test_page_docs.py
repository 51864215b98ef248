"""`/docs` in the browser: Swagger UI under the policy of the page, and without any other host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser_page import CSS, BrowserPage
from page_server import PageServer

KEY = "secret-key"
OpenDocs = Callable[..., BrowserPage]


@pytest.fixture
def open_docs(driver: Any, start_server: Callable[..., PageServer]) -> Iterator[OpenDocs]:
    """Opens the page of a new server. At the end the console must hold nothing but what the test expects."""
    opened: list[BrowserPage] = []

    def open_it(**settings: Any) -> BrowserPage:
        page = BrowserPage(driver, start_server(**settings))
        opened.append(page)
        page.emulate(width=1280, height=900)
        driver.get(f"{page.server.url}/docs")
        return page

    yield open_it
    for page in opened:
        page.leave()
    assert [each for page in opened for each in page.unexpected_problems()] == []


def until_shown(page: BrowserPage) -> None:
    page.until(lambda: len(page.all(".opblock")) > 10, "the operations", seconds=30)


def paths_of(page: BrowserPage) -> list[str]:
    return [each.text.replace("\u200b", "") for each in page.all(".opblock-summary-path")]


def hosts_of(page: BrowserPage) -> set[str]:
    """Of all that the page has loaded."""
    code = "return performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin)"
    return set(page.script(code))


def open_operation(page: BrowserPage, path: str) -> None:
    block = next(each for each in page.all(".opblock") if each.text.split("\n")[1] == path)
    block.find_element(CSS, ".opblock-summary button").click()
    page.until(lambda: "Request body" in page.text(".opblock.is-open"), "the operation")


def give_key(page: BrowserPage, key: str) -> None:
    page.until(lambda: page.shown("#key-form"), "the question for the key")
    page.find("#key").clear()
    page.find("#key").send_keys(key)
    page.click("#key-form button")


def test_operations_are_listed_with_their_fields(open_docs: OpenDocs) -> None:
    page = open_docs()
    until_shown(page)
    assert "/v1/chat/completions" in paths_of(page)
    assert page.text("#note") == ""
    assert not page.shown("#key-form")
    open_operation(page, "/v1/responses")
    assert "How warm is it in Paris?" in page.text(".opblock.is-open .body-param__example")
    assert hosts_of(page) == {page.server.url}


def test_request_is_sent_with_the_key(open_docs: OpenDocs) -> None:
    page = open_docs(api_key=KEY)
    page.expected_problems = ["status of 401"]
    give_key(page, KEY)
    until_shown(page)
    open_operation(page, "/v1/chat/completions")
    page.click(".try-out__btn")
    page.until(lambda: page.shown(".execute"), "the button that sends it")
    page.click(".execute")
    page.until(lambda: page.text("td.response-col_status:not(.col_header)") == "200", "the answer")
    assert "Hello" in page.text(".live-responses-table")
    assert len(page.server.engine.requests) == 1
    assert hosts_of(page) == {page.server.url}


def test_key_is_asked_for_until_it_is_right_and_kept_in_the_tab(open_docs: OpenDocs) -> None:
    page = open_docs(api_key=KEY)
    page.expected_problems = ["status of 401"]
    give_key(page, "wrong")
    page.until(lambda: page.server.n_requests("other", "401", "HEAD") == 2, "the second refusal")
    assert "API key" in page.text("#note")
    assert page.all(".opblock") == []
    give_key(page, KEY)
    until_shown(page)
    assert not page.shown("#key-form")
    page.driver.refresh()
    until_shown(page)
    assert KEY not in str(page.script("return JSON.stringify(localStorage) + document.cookie"))
