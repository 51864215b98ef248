"""Text of the model on the page: what is rendered, and that nothing in it is executed."""

from __future__ import annotations

from typing import Any

import pytest
from browser_page import BrowserPage, OpenPage
from fake_engine import FakeEngine
from page_scripts import saying

HOSTILE = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script> **<b onclick=hack()>bold</b>** '
    "`<svg onload=window.hacked=1>` [link](javascript:window.hacked=1) <a href='http://evil.example/'>x</a>\n\n"
    "```html\n</code></pre><script>window.hacked=1</script>\n```\n\n| <i>a</i> |\n|---|\n| <u>b</u> |\n"
)
DOCUMENTS = [
    "# Title\n\nSome *soft* and **hard** text with `code`.\n\n- one\n  - two\n- three\n\n1. a\n2. b\n\nEnd.",
    "```py\nx = 1\n\n```\nafter\n~~~\nopen until the end\n",
    "> quoted\n> twice\n\n---\n| a | b |\n|---|:-:|\n| 1 | **2** |\n",
    "1. First\n\n   ```sh\n   make\n   ```\n2. Second\nlazy\n\n- x\n\n- y\n",
    "**open *and `never closed\n\n***both***, 2 * 3 * 4, a**b**c, ``a`b``\n",
    "-\n- \n#\n#x\n1.\n>\n|\n```",
]

OUTLINE = """
const outline = (node) => node.nodeType === 3 ? node.data
  : [node.tagName.toLowerCase(), ...[...node.childNodes].map(outline).filter((each) => each !== '')];
const box = document.createElement('div');
const view = new module.StreamingMarkdown(box);
"""


def outline(page: BrowserPage, text: str, *, steps: bool = False) -> Any:
    """The nodes that a text becomes, given at once or character by character."""
    feed = "for (let n = 1; n <= args[0].length; n += 1) view.update(args[0].slice(0, n));"
    code = OUTLINE + (feed if steps else "") + "view.update(args[0], true); return outline(box).slice(1);"
    return page.module("markdown.js", code, text)


def test_text_cannot_become_markup_or_code(open_page: OpenPage) -> None:
    page = open_page(FakeEngine(saying(*HOSTILE, reasoning=["<img src=x onerror=window.hacked=1>"])))
    page.ask_and_wait("<img src=x onerror=window.hacked=1>")
    page.click(".reasoning summary")
    assert page.script("return window.hacked") is None
    tags = page.script("return [...document.querySelectorAll('#turns *')].map((e) => e.tagName)")
    assert {"IMG", "SCRIPT", "SVG", "A", "B", "I", "U"} & {tag.upper() for tag in tags} == set()
    for part in (
        "<img src=x onerror=",
        "<svg onload=",
        "javascript:window",
        "</code></pre><script>",
        "<u>b</u>",
    ):
        assert part in page.answer()


def test_page_itself_cannot_parse_text_as_html(open_page: OpenPage) -> None:
    page = open_page()
    page.expected_problems = ["TrustedHTML"]
    result = page.script(
        "try { document.createElement('p').innerHTML = '<b>x</b>'; return 'parsed'; }"
        "catch (error) { return error.name; }"
    )
    assert result == "TypeError"


def test_markdown_becomes_elements(open_page: OpenPage) -> None:
    page = open_page()
    assert outline(page, DOCUMENTS[0]) == [
        ["h3", "Title"],
        ["p", "Some ", ["em", "soft"], " and ", ["strong", "hard"], " text with ", ["code", "code"], "."],
        ["ul", ["li", "one", ["ul", ["li", "two"]]], ["li", "three"]],
        ["ol", ["li", "a"], ["li", "b"]],
        ["p", "End."],
    ]
    assert outline(page, DOCUMENTS[2]) == [
        ["blockquote", "quoted\ntwice"],
        ["hr"],
        [
            "div",
            [
                "table",
                ["thead", ["tr", ["th", "a"], ["th", "b"]]],
                ["tbody", ["tr", ["td", "1"], ["td", ["strong", "2"]]]],
            ],
        ],
    ]
    code = outline(page, "```py\nx = 1\n\ny\n```\nafter")
    assert code[0][2] == ["pre", ["code", "x = 1\n\ny"]]
    assert code[0][1][1] == ["span", "py"]
    assert code[1] == ["p", "after"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 * 3 * 4", ["2 * 3 * 4"]),
        ("a**b**c", ["a", ["strong", "b"], "c"]),
        ("***both***", [["strong", ["em", "both"]]]),
        ("``a`b``", [["code", "a`b"]]),
        ("**open", ["**open"]),
        ("`open **b**", ["`open ", ["strong", "b"]]),
        ("** a **", ["** a **"]),
        ("snake_case_name", ["snake_case_name"]),
    ],
)
def test_inline_marks(open_page: OpenPage, text: str, expected: list[Any]) -> None:
    assert outline(open_page(), text) == [["p", *expected]]


def test_growing_text_ends_as_the_whole_one(open_page: OpenPage) -> None:
    page = open_page()
    for text in DOCUMENTS:
        assert outline(page, text, steps=True) == outline(page, text), text


def test_hostile_text_takes_no_longer_than_other_text(open_page: OpenPage) -> None:
    page = open_page()
    page.driver.set_script_timeout(20)
    parts = ("**a ", "*a ", "`a ``b ", "> ", "- a\n  ", "|", "#", "```\n", "1. ", "* * ", "|-", "\n|-x", "` ")
    for part in (*parts, "```aaaa"):
        seconds = page.module(
            "markdown.js",
            OUTLINE + "const began = performance.now(); view.update(args[0].repeat(20000));"
            "return (performance.now() - began) / 1000;",
            part,
        )
        assert seconds < 5, part


def test_events_are_found_however_they_are_cut(open_page: OpenPage) -> None:
    page = open_page()
    stream = (
        ': ping\n\ndata: {"a":1}\r\n\r\ndata:two\ndata: lines\n\nevent: x\nid: 1\n\n'
        "data: ü€😀\r\rdata: [DONE]\n\n"
    )
    found = page.module(
        "sse.js",
        "const results = [];"
        "for (let cut = 0; cut <= args[0].length; cut += 1) {"
        "  const parser = new module.EventParser();"
        "  results.push([...parser.feed(args[0].slice(0, cut)), ...parser.feed(args[0].slice(cut))]);"
        "}"
        "return [...new Set(results.map((each) => JSON.stringify(each)))].map((each) => JSON.parse(each));",
        stream,
    )
    assert found == [['{"a":1}', "two\nlines", "ü€😀", "[DONE]"]]
