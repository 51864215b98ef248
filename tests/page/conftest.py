"""The real server on a fake engine, and headless Chromium in front of it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))

from browser_page import BrowserPage, OpenPage
from fake_engine import FakeEngine
from page_server import PageServer


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("S2MOE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def start_server() -> Iterator[Callable[..., PageServer]]:
    """Starts a server: `start_server(FakeEngine(…), api_key="k", …)`."""
    with ExitStack() as stack:

        def start(engine: FakeEngine | None = None, **settings: Any) -> PageServer:
            return stack.enter_context(PageServer(engine or FakeEngine(), **settings))

        yield start


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    """One browser for all tests; each server has a port, and so storage, of its own."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("Debian's packages chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield browser
    browser.quit()


@pytest.fixture
def open_page(driver: Any, start_server: Callable[..., PageServer]) -> Iterator[OpenPage]:
    """Opens the page of a new server: `open_page(FakeEngine(…), api_key="k", …)`. At the end the console must
    hold nothing but what the test has expected."""
    opened: list[BrowserPage] = []

    def open_it(engine: FakeEngine | None = None, **settings: Any) -> BrowserPage:
        page = BrowserPage(driver, start_server(engine, **settings))
        opened.append(page)
        page.open()
        return page

    yield open_it
    for page in opened:
        page.leave()
    problems = [each for page in opened for each in page.unexpected_problems()]
    assert problems == []
