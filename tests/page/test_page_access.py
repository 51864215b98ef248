"""Who uses the page: with a screen reader, on a phone, in the dark, without a network."""

from __future__ import annotations

import asyncio

import pytest
from browser_page import INTERACTIVE_ROLES, OpenPage
from fake_engine import FakeEngine
from page_scripts import pausing, saying, stats

TABLE = f"| {'cell | ' * 30}\n| {'--- | ' * 30}\n| {'x | ' * 30}"
CODE = f"```text\n{'long line ' * 60}\n```"
WIDE_TEXT = f"{'W' * 300}\n\n{CODE}\n\n{TABLE}\n\n- {'item' * 80}\n\n`{'code' * 100}`"


def contrast(one: list[float], other: list[float]) -> float:
    """WCAG's ratio of two colours, [3] each, 0 to 255."""

    def luminance(colour: list[float]) -> float:
        parts = [each / 255 for each in colour]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_all_controls_have_names_and_the_page_has_landmarks(open_page: OpenPage) -> None:
    page = open_page(FakeEngine(saying("Text.\n\n```py\nx = 1\n```", reasoning=["Hm."])))
    page.server.do(lambda: page.server.rig.metrics.on_stats(stats()))
    page.ask_and_wait("hi")
    page.until(lambda: len(page.all("#pools tr")) == 4, "the pools")
    nodes = page.accessible_nodes()
    assert [node for node in nodes if node[0] in INTERACTIVE_ROLES and node[1] == ""] == []
    roles = [role for role, _ in nodes]
    for landmark in ("banner", "main", "complementary", "form", "region"):
        assert landmark in roles, landmark
    assert ("button", "Send") in nodes
    assert ("textbox", "Message") in nodes
    assert ("button", "Copy this answer") in nodes
    assert {"s2moe", "You", "Model", "Live figures"} <= {name for role, name in nodes if role == "heading"}

    page.click("#show-settings")
    nodes = page.accessible_nodes()
    assert ("dialog", "Settings") in nodes
    fields = [name for role, name in nodes if role in ("spinbutton", "combobox", "textbox")]
    assert len(fields) == 10
    assert "" not in fields


def test_whole_sentences_are_announced_and_half_ones_are_not(open_page: OpenPage) -> None:
    gate = asyncio.Event()
    page = open_page(FakeEngine(pausing("It is **so**. And th", gate, "en it is not. The e")))
    page.ask("tell me")
    page.until(lambda: page.text("#announcements") != "", "the first sentence")
    assert page.text("#announcements").replace("  ", " ") == "It is so ."
    assert page.find("#announcements").get_attribute("aria-live") == "polite"
    page.server.do(gate.set)
    page.until_idle()
    said = page.text("#announcements")
    assert "And then it is not." in said
    assert said.endswith("The eEnd of the answer.")


@pytest.mark.parametrize("figures", [False, True])
def test_nothing_is_wider_than_a_small_screen(open_page: OpenPage, figures: bool) -> None:
    page = open_page(FakeEngine(saying(WIDE_TEXT, reasoning=["R" * 200])), alias="a-rather-long-name-" * 6)
    page.emulate(width=360, height=740)
    page.driver.refresh()
    page.server.do(lambda: page.server.rig.metrics.on_stats(stats()))
    assert not page.shown("#figures")
    page.ask_and_wait("Q" * 200)
    page.click(".reasoning summary")
    page.until(lambda: len(page.all("#pools tr")) == 4, "the pools")
    if figures:
        page.click("#show-figures")
        assert page.shown("#figures")
    width = "const e = arguments[0]; return [e.scrollWidth, e.clientWidth]"
    for selector in ("html", "body", "#scroller", ".bar", "#composer", *(["#figures"] if figures else [])):
        scroll, client = page.script(width, page.find(selector))
        assert scroll <= client <= 360, selector
    assert page.find("#input").size["height"] > 30
    assert page.find("#scroller").size["height"] > 100
    page.click("#show-settings")
    scroll, client = page.script(width, page.find("#settings"))
    assert scroll <= client <= 360


def test_figures_can_be_folded_away(open_page: OpenPage) -> None:
    page = open_page()
    button = page.find("#show-figures")
    assert (button.get_attribute("aria-expanded"), page.shown("#figures")) == ("true", True)
    button.click()
    assert (button.get_attribute("aria-expanded"), page.shown("#figures")) == ("false", False)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_preference_and_can_be_read(open_page: OpenPage, scheme: str) -> None:
    page = open_page(FakeEngine(saying("Text with `code`.")))
    page.emulate(width=1280, height=900, scheme=scheme)
    page.ask_and_wait("hi")
    colours = page.script(
        "const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});"
        "const styles = getComputedStyle(document.documentElement);"
        "const names = arguments[0];"
        "return Object.fromEntries(names.map((name) => {"
        "  canvas.fillStyle = styles.getPropertyValue(`--${name}`);"
        "  canvas.fillRect(0, 0, 1, 1);"
        "  return [name, [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)]];"
        "}));",
        ["ground", "surface", "text", "soft", "accent", "on-accent", "question", "code", "bad"],
    )
    assert (sum(colours["ground"]) > 600) == (scheme == "light")
    for front, back in (
        *(("text", back) for back in ("ground", "surface", "question", "code")),
        *(("soft", back) for back in ("ground", "surface", "code")),
        ("on-accent", "accent"),
        ("bad", "ground"),
        ("surface", "bad"),
    ):
        assert contrast(colours[front], colours[back]) >= 4.5, (front, back)


def test_everything_comes_from_this_server(open_page: OpenPage) -> None:
    page = open_page()
    page.until(lambda: page.text("#model-name") == "demo", "the model")
    names = page.script("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert len(names) > 10
    assert all(name.startswith(page.server.url) for name in names)
    assert page.find("h1").text == "s2moe"
