"""The conversation in headless Chromium: streaming, stopping, errors, settings."""

from __future__ import annotations

import asyncio
import json

import pytest
from browser_page import ENTER, ESCAPE, SHIFT, TAB, OpenPage
from fake_engine import FakeEngine, endless, endless_prefill, last_text
from page_scripts import failing, in_turn, pausing, saying

KEY = "secret-key"
CONTEXT_MESSAGE = "This model's maximum context length is 64 tokens, but the messages are 99 tokens long."


def messages_of(engine: FakeEngine, index: int = -1) -> list[dict[str, str]]:
    return list(json.loads(engine.requests[index].messages_json))


def test_answer_appears_while_it_is_made(open_page: OpenPage) -> None:
    gate = asyncio.Event()
    page = open_page(FakeEngine(pausing("Hello ", gate, "world.")))
    page.ask("greet me")
    page.until_answer_has("Hello")
    assert page.text(".question .text") == "greet me"
    assert page.find(".answer").get_attribute("aria-busy") == "true"
    assert page.shown("#stop")
    assert not page.shown("#send")
    page.server.do(gate.set)
    page.until_idle()
    assert page.answer() == "Hello world."
    assert page.find(".answer").get_attribute("aria-busy") is None
    assert "2 tokens" in page.text(".turn-facts")
    assert "8.0 tok/s" in page.text(".turn-facts")


def test_stop_button_stops_the_engine(open_page: OpenPage) -> None:
    engine = FakeEngine(endless)
    page = open_page(engine)
    page.ask("go on")
    page.until_answer_has("xxx")
    page.click("#stop")
    page.until_idle()
    page.until(lambda: "go on" in engine.aborted_at, "the abort")
    assert page.answer().startswith("xxx")
    assert "stopped" in page.text(".turn-facts")
    assert page.focused_id() == "input"


def test_stopping_before_the_first_token_gives_the_question_back(open_page: OpenPage) -> None:
    engine = FakeEngine(endless_prefill)
    page = open_page(engine)
    page.ask("long prompt")
    page.until(lambda: engine.running == "long prompt", "the engine")
    page.until(lambda: "10 tokens" in page.text(".waiting"), "the progress")
    page.keys(ESCAPE)
    page.until_idle()
    page.until(lambda: "long prompt" in engine.aborted_at, "the abort")
    assert page.find("#input").get_property("value") == "long prompt"


def test_everything_works_with_the_keyboard_alone(open_page: OpenPage) -> None:
    engine = FakeEngine(in_turn(saying("Yes."), endless))
    page = open_page(engine)
    assert page.focused_id() == "input"
    page.keys("first", SHIFT + ENTER)
    page.keys("second", ENTER)
    page.until_idle()
    assert last_text(engine.requests[0]) == "first\nsecond"
    assert page.answer() == "Yes."
    page.keys("more", ENTER)
    page.until_answer_has("xx")
    page.keys(ESCAPE)
    page.until(lambda: "more" in engine.aborted_at, "the abort")
    page.until_idle()

    reached = set()
    for _ in range(40):
        page.keys(TAB)
        focused = page.script(
            "const e = document.activeElement;"
            "return [e.id || e.className || e.tagName, e.matches(':focus-visible') || e === document.body,"
            " getComputedStyle(e).outlineStyle]"
        )
        reached.add(focused[0])
        assert focused[1], f"{focused[0]} does not show that it has the focus"
        assert focused[2] != "none" or focused[0] == "BODY", f"{focused[0]} has no outline"
        if focused[0] == "input":
            break
    assert {"skip", "new", "show-figures", "show-settings", "scroller", "input", "send"} <= reached
    page.script("document.querySelector('.skip').focus()")
    page.keys(ENTER)
    assert page.focused_id() == "input"

    page.script("document.getElementById('show-settings').focus()")
    page.keys(ENTER)
    page.until(lambda: page.find("#settings").get_property("open"), "the dialog")
    page.keys(ESCAPE)
    page.until(lambda: not page.find("#settings").get_property("open"), "the end of the dialog")
    assert page.focused_id() == "show-settings"


def test_enter_sends_nothing_empty_and_nothing_twice(open_page: OpenPage) -> None:
    engine = FakeEngine(endless)
    page = open_page(engine)
    page.ask("   ")
    page.find("#input").clear()
    page.ask("real")
    page.until_answer_has("x")
    page.ask("too early")
    assert page.find("#input").get_property("value") == "too early"
    assert [last_text(each) for each in engine.requests] == ["real"]


def test_next_question_brings_the_conversation_along(open_page: OpenPage) -> None:
    engine = FakeEngine(in_turn(saying("One."), saying("Two."), saying("Three.")))
    page = open_page(engine)
    page.ask_and_wait("a")
    page.ask_and_wait("b")
    assert messages_of(engine) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "b"},
    ]
    assert len(page.all(".retry")) == 1
    page.click(".retry")
    page.until_answer_has("Three.")
    page.until_idle()
    assert messages_of(engine) == messages_of(engine, 1)
    assert [each.text for each in page.all(".question .text")] == ["a", "b"]


def test_new_conversation_forgets_the_old_one(open_page: OpenPage) -> None:
    engine = FakeEngine(in_turn(saying("One."), endless, saying("Three.")))
    page = open_page(engine)
    page.ask_and_wait("a")
    page.ask("b")
    page.until_answer_has("xx")
    page.click("#new")
    page.until(lambda: "b" in engine.aborted_at, "the abort")
    assert page.all(".turn") == []
    assert page.shown("#welcome")
    assert page.focused_id() == "input"
    assert page.ask_and_wait("c") == "Three."
    assert messages_of(engine) == [{"role": "user", "content": "c"}]


def test_error_before_the_answer_shows_the_servers_message(open_page: OpenPage) -> None:
    page = open_page(
        FakeEngine(in_turn(failing("context_length_exceeded", CONTEXT_MESSAGE), saying("Fine.")))
    )
    page.expected_problems = ["status of 400"]
    page.ask_and_wait("much too long")
    shown = page.text(".error")
    assert CONTEXT_MESSAGE in shown
    assert "400" in shown
    assert "context_length_exceeded" in shown
    assert page.find("#input").get_property("value") == "much too long"
    page.find("#input").clear()
    assert page.ask_and_wait("short") == "Fine."
    assert page.all(".error") == []
    assert messages_of(page.server.engine) == [{"role": "user", "content": "short"}]


def test_error_within_the_answer_keeps_what_there_is(open_page: OpenPage) -> None:
    page = open_page(FakeEngine(failing("numeric_error", "the logits are not numbers", "Half an ")))
    page.ask_and_wait("hi")
    assert page.answer() == "Half an"
    assert "the logits are not numbers" in page.text(".error")
    assert page.find("#input").get_property("value") == ""


def test_lost_server_is_said(open_page: OpenPage) -> None:
    page = open_page(FakeEngine(endless))
    page.expected_problems = ["ERR_"]
    page.ask("hi")
    page.until_answer_has("xx")
    page.server.stop()
    page.until_idle()
    assert "cut off" in page.text(".error")
    page.until(lambda: "unreachable" in page.state(), "the state")
    page.ask_and_wait("still there?")
    assert "does not answer" in page.text(".turn:last-child .error")


def test_settings_reach_the_request(open_page: OpenPage) -> None:
    engine = FakeEngine()
    page = open_page(engine)
    page.ask_and_wait("plain")
    plain = engine.requests[-1]
    assert (plain.sampling.temperature, plain.sampling.seed, plain.max_tokens) == (None, None, None)
    assert plain.speculation.method is None
    assert "enable_thinking" not in json.loads(plain.chat_options_json)

    page.click("#new")
    page.set(
        system="Be brief.",
        thinking="off",
        temperature="0.25",
        top_p="0.5",
        max_tokens="77",
        seed="42",
        speculation="cascade",
        preset="exact",
        max_nodes="3",
    )
    page.ask_and_wait("tuned")

    def check() -> None:
        request = engine.requests[-1]
        assert messages_of(engine) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": last_text(request)},
        ]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.25, 0.5, 42)
        assert request.max_tokens == 77
        speculation = request.speculation
        assert (speculation.method, speculation.preset, speculation.max_nodes) == ("cascade", "exact", 3)
        assert json.loads(request.chat_options_json)["enable_thinking"] is False

    check()
    page.driver.refresh()
    page.ask_and_wait("after a reload")
    check()
    page.click("#show-settings")
    page.click("#reset-settings")
    page.click("#close-settings")
    page.click("#new")
    page.ask_and_wait("plain again")
    assert engine.requests[-1].sampling == plain.sampling
    assert messages_of(engine) == [{"role": "user", "content": "plain again"}]


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "5"), ("top_p", "1.5"), ("max_nodes", "8"), ("seed", "1.5")]
)
def test_wrong_setting_is_named_and_not_sent(open_page: OpenPage, field: str, value: str) -> None:
    engine = FakeEngine()
    page = open_page(engine)
    page.set(**{field: value})
    assert page.find("#settings").get_property("open")
    assert page.text(f"label[for={field}]") in page.text("#settings-problem")
    page.keys(ESCAPE)
    page.ask("hi")
    page.until(lambda: page.find("#settings").get_property("open"), "the dialog")
    assert page.focused_id() == field
    assert engine.requests == []


def test_key_is_asked_for_used_and_kept_in_the_tab_only(open_page: OpenPage) -> None:
    engine = FakeEngine()
    page = open_page(engine, api_key=KEY)
    page.expected_problems = ["status of 401"]
    page.until(lambda: "API key" in page.text("#figures-note"), "the note")
    page.ask_and_wait("hi")
    assert "Send an API key" in page.text(".error")
    assert engine.requests == []
    page.set(api_key=KEY)
    page.until(lambda: page.text("#model-name") == "demo", "the name of the model")
    page.until(lambda: not page.shown("#figures-note"), "the end of the note")
    page.find("#input").send_keys(ENTER)  # the question came back
    page.until_answer_has("Hello")
    stores = page.script(
        "return [JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie]"
    )
    assert KEY not in stores[0]
    assert KEY in stores[1]
    assert stores[2] == ""


@pytest.mark.parametrize("names", ["both", "reasoning_content", "reasoning"])
def test_reasoning_is_apart_and_collapsed(open_page: OpenPage, names: str) -> None:
    engine = FakeEngine(saying("Forty-two.", reasoning=["Six times ", "seven."]))
    page = open_page(engine, reasoning_fields=names)
    page.ask_and_wait("what is it?")
    assert page.answer() == "Forty-two."
    assert page.text(".reasoning-text") == "Six times seven."
    assert not page.shown(".reasoning-text")
    assert page.text(".reasoning summary").startswith("Thought for")
    page.find(".reasoning summary").send_keys(ENTER)
    assert page.shown(".reasoning-text")
    page.ask_and_wait("sure?")
    assert "Six times" not in page.server.engine.requests[-1].messages_json.decode()


def test_answer_and_code_can_be_copied(open_page: OpenPage) -> None:
    text = "Run:\n\n```sh\nmake test\n```\n"
    page = open_page(FakeEngine(saying(text)))
    page.ask_and_wait("how?")
    page.script(
        "Object.defineProperty(navigator, 'clipboard', {configurable: true, value:"
        " {writeText: async (text) => { window.copied = text; }}});"
    )
    page.click("button[aria-label='Copy this answer']")
    page.until(lambda: page.script("return window.copied") == text, "the answer")
    page.click("button[aria-label='Copy this code']")
    page.until(lambda: page.script("return window.copied") == "make test", "the code")
    page.until(lambda: page.text(".code-head button") == "Copied", "the confirmation")


def test_copying_works_without_a_clipboard_api(open_page: OpenPage) -> None:
    page = open_page(FakeEngine(saying("Copy me.")))
    page.ask_and_wait("hi")
    page.script(
        "Object.defineProperty(navigator, 'clipboard', {configurable: true, value: undefined});"
        "document.execCommand = (name) => { window.copied = name + getSelection(); return true; };"
    )
    page.click("button[aria-label='Copy this answer']")
    page.until(lambda: page.script("return window.copied") == "copyCopy me.", "the copy")


def test_reader_who_scrolled_up_is_left_there(open_page: OpenPage) -> None:
    gate = asyncio.Event()
    long = "\n\n".join(f"Paragraph {number}." for number in range(80))
    page = open_page(FakeEngine(pausing(long, gate, "\n\nThe last one.")))
    page.ask("much")
    page.until_answer_has("Paragraph 79.")
    bottom = (
        "const s = document.getElementById('scroller'); return s.scrollHeight - s.scrollTop - s.clientHeight"
    )
    page.until(lambda: page.script(bottom) < 2, "the end of the conversation")
    page.script("document.getElementById('scroller').scrollTop = 0")
    page.server.do(gate.set)
    page.until_idle()
    assert page.script("return document.getElementById('scroller').scrollTop") == 0
