"""Pictures of the page, for a person to look at: build/page has them after each run."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser_page import OpenPage
from fake_engine import FakeEngine
from page_scripts import saying, stats

FOLDER = Path(__file__).resolve().parents[2] / "build" / "page"
ANSWER = """The **capital** of France is *Paris*.

| city | people |
|---|---|
| Paris | 2.1 million |

```python
print("Paris")
```
"""


@pytest.mark.parametrize(
    ("name", "width", "height", "scheme"),
    [("light", 1280, 900, "light"), ("dark", 1280, 900, "dark"), ("small", 360, 740, "light")],
)
def test_picture_of_a_conversation(
    open_page: OpenPage, name: str, width: int, height: int, scheme: str
) -> None:
    page = open_page(FakeEngine(saying(ANSWER, reasoning=["A question of geography."])))
    page.server.do(lambda: page.server.rig.metrics.on_stats(stats(hits=9, misses=1)))
    page.emulate(width=width, height=height, scheme=scheme)
    page.driver.refresh()  # figures are folded away where a page is opened on a small screen
    page.ask_and_wait("What is the capital of France?")
    page.until(lambda: len(page.all("#pools tr")) == 4, "the pools")
    picture = page.picture()
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.png").write_bytes(picture.png)
    assert (picture.width, picture.height) == (width, height)
    # letters have edges in many shades; a blank page has one colour, one without its styles few
    assert picture.n_colours > 200
    assert (picture.brightness > 0.5) == (scheme == "light")
