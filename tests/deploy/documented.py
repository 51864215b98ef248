"""Commands as the project's pages give them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("deploy/*/README.md")))


def script(page: Path) -> str:
    """All indented blocks of a page, as a shell would read them."""
    blocks = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", page.read_text(), re.MULTILINE)
    return "".join(re.sub(r"^ {4}", "", block, flags=re.MULTILINE) for block in blocks)


def commands(page: Path, start: str) -> list[str]:
    """Those of a page that begin with `start`, in blocks or within the text, each on one line."""
    within = re.findall(r"`([^`\n]+)`", page.read_text())
    lines = [*re.sub(r"\\\n\s*", "", script(page)).splitlines(), *within]
    return [line for line in lines if line.startswith(f"{start} ")]
