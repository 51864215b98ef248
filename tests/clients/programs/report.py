"""What the programs for Python clients share: where the server is, what to ask it, and the report on stdout.

A program is started as `python PROGRAM URL KEY CASES.json`. It prints one JSON object: what the client saw in
each case, or `{"failed": text}` where it raised what the case did not expect.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRONG_KEY = "wrong-key"


class Report:
    def __init__(self) -> None:
        self.url, self.key, cases = sys.argv[1:]
        self.v1 = f"{self.url}/v1"
        self._seen: dict[str, Any] = {}
        content = json.loads(Path(cases).read_text())
        self.model: str = content["model"]
        self.prompts: dict[str, str] = content["prompts"]
        self.tool: dict[str, Any] = content["tool"]
        self.tool_results: dict[str, str] = content["tool_results"]
        self.schema: dict[str, Any] = content["schema"]

    def ask(self, name: str) -> list[dict[str, Any]]:
        """The messages of a case."""
        return [{"role": "user", "content": self.prompts[name]}]

    def case(self, name: str) -> Callable[[Callable[[], Any]], None]:
        """Runs the decorated function at once."""

        def run(function: Callable[[], Any]) -> None:
            try:
                self._seen[name] = function()
            except Exception:
                self._seen[name] = {"failed": traceback.format_exc()}

        return run

    def print(self, version: str) -> None:
        print(json.dumps({"version": version, "seen": self._seen}))


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, int]:
    counts = {"prompt": prompt, "completion": completion}
    return counts if cached is None else {**counts, "cached": cached}


def call(name: str, arguments: str | dict[str, Any], id_: str | None) -> dict[str, Any]:
    """A tool call; arguments are an object however the client gives them."""
    values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    return {"name": name, "arguments": values, "id": id_}
