"""The page as a person with a browser has it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from page_server import PageServer

CSS = "css selector"
TAB, ENTER, SHIFT, ESCAPE = "\ue004", "\ue007", "\ue008", "\ue00c"
"""What WebDriver calls these keys. SHIFT stays down for the rest of one call."""
INTERACTIVE_ROLES = frozenset(
    {
        "button",
        "checkbox",
        "combobox",
        "DisclosureTriangle",
        "dialog",
        "link",
        "listbox",
        "meter",
        "option",
        "searchbox",
        "slider",
        "spinbutton",
        "switch",
        "tab",
        "textbox",
    }
)


@dataclass(frozen=True)
class Picture:
    """A screenshot."""

    png: bytes
    width: int
    height: int
    n_colours: int
    brightness: float
    """0 … 1, mean of all pixels."""


class BrowserPage:
    """Selectors are CSS. Conditions are waited for; TimeoutError tells which one did not come."""

    def __init__(self, driver: Any, server: PageServer) -> None:
        self.driver = driver
        self.server = server
        self.expected_problems: list[str] = []
        """Parts of console messages that the test provokes, such as the status of a refused request."""
        self._problems: list[str] = []

    def open(self) -> None:
        self.emulate(width=1280, height=900)
        self.driver.get(f"{self.server.url}/")
        self.until(lambda: self.state() != "connecting", "the state of the engine")

    def leave(self) -> None:
        """Ends what the page does, so that the server can end, too."""
        self._collect_problems()
        self.driver.get("about:blank")

    def unexpected_problems(self) -> list[str]:
        expected = self.expected_problems
        return [each for each in self._problems if not any(part in each for part in expected)]

    def _collect_problems(self) -> None:
        for entry in self.driver.get_log("browser"):
            if entry["level"] in ("WARNING", "SEVERE"):
                self._problems.append(entry["message"])

    # ── looking ──

    def state(self) -> str:
        return self.text("#state-text")

    def find(self, selector: str) -> Any:
        return self.driver.find_element(CSS, selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(CSS, selector))

    def text(self, selector: str) -> str:
        """Of the first match, also where it cannot be seen; "" where there is none."""
        found = self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return str(found).replace("\xa0", " ").strip()

    def shown(self, selector: str) -> bool:
        return any(each.is_displayed() for each in self.all(selector))

    def focused_id(self) -> str:
        return str(self.script("return document.activeElement.id"))

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def module(self, name: str, body: str, *arguments: Any) -> Any:
        """Runs `body`, the inside of an async function of `module` and `args`, with a module of the page."""
        code = (
            "const [name, args, done] = [arguments[0], arguments[1], arguments[2]];"
            "import(new URL(`page/${name}`, document.baseURI)).then(async (module) => {"
            f"  {body}"
            "}).then((value) => done({value}), (error) => done({error: String(error)}));"
        )
        result = self.driver.execute_async_script(code, name, list(arguments))
        assert "error" not in result, result["error"]
        return result.get("value")

    def until(self, condition: Callable[[], bool], what: str, *, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds} s for {what}")
            time.sleep(0.02)

    # ── doing ──

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def keys(self, *keys: str) -> None:
        """Types into whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def ask(self, text: str) -> None:
        """Writes and sends, without waiting for the answer."""
        self.find("#input").send_keys(text, ENTER)

    def ask_and_wait(self, text: str) -> str:
        """The text of the answer."""
        self.ask(text)
        self.until_idle()
        return self.answer()

    def answer(self) -> str:
        """The text of the last answer as it is now."""
        return self.text(".turn:last-child .answer > .text")

    def until_answer_has(self, text: str) -> None:
        self.until(lambda: text in self.answer(), f"{text!r} in the answer")

    def until_idle(self) -> None:
        self.until(lambda: self.find("#send").is_displayed(), "the end of the answer")

    def set(self, **values: str) -> None:
        """Fills fields of the settings dialog and closes it; numbers and texts are typed, choices chosen."""
        self.click("#show-settings")
        for name, value in values.items():
            field = self.find(f"#settings [name={name}]")
            if field.tag_name == "select":
                field.find_element(CSS, f"option[value='{value}']").click()
            else:
                field.clear()
                field.send_keys(value)
        self.click("#close-settings")

    # ── emulating ──

    def emulate(self, *, width: int, height: int, scheme: str = "light") -> None:
        """A window of so many CSS pixels, and the colour scheme that its user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def hide(self, hidden: bool) -> None:
        """What the browser tells a page whose tab is left or come back to."""
        self.script(
            "const hidden = arguments[0];"
            "Object.defineProperty(document, 'hidden', {configurable: true, get: () => hidden});"
            "document.dispatchEvent(new Event('visibilitychange'));",
            hidden,
        )

    def picture(self) -> Picture:
        """What is on the screen."""
        png = self.driver.get_screenshot_as_base64()
        self.driver.switch_to.new_window("tab")  # whose policy lets a script look at it
        try:
            described = self.driver.execute_async_script(
                "const [png, done] = arguments;"
                "const bytes = Uint8Array.from(atob(png), (each) => each.charCodeAt(0));"
                "createImageBitmap(new Blob([bytes], {type: 'image/png'})).then((image) => {"
                "  const canvas = new OffscreenCanvas(image.width, image.height).getContext('2d');"
                "  canvas.drawImage(image, 0, 0);"
                "  const pixels = canvas.getImageData(0, 0, image.width, image.height).data;"
                "  const colours = new Set(new Uint32Array(pixels.buffer));"
                "  let sum = 0;"
                "  for (let i = 0; i < pixels.length; i += 1) sum += i % 4 < 3 ? pixels[i] : 0;"
                "  done([image.width, image.height, colours.size, sum / (pixels.length / 4 * 3 * 255)]);"
                "});",
                png,
            )
        finally:
            self.driver.close()
            self.driver.switch_to.window(self.driver.window_handles[0])
        return Picture(base64.b64decode(png), *described)

    def accessible_nodes(self) -> list[tuple[str, str]]:
        """Role and name of each node of the accessibility tree that is not ignored."""
        nodes = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        return [
            (str(node["role"]["value"]), str(node.get("name", {}).get("value", "")).strip())
            for node in nodes
            if not node["ignored"]
        ]


OpenPage = Callable[..., BrowserPage]
