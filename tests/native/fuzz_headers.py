"""Reads mutated headers with s2moe_model_layout() and s2moe_experts_open().

    python fuzz_headers.py FILE CASE FIRST COUNT [MODEL]

FILE is a small qwen3moe file, which is overwritten by its mutants number FIRST, FIRST + 1, …; MODEL is the
first file of its model, if that is another one. A process of its own: each case has 5 s of time, and 256 MiB
of address space more than the process has at its start; whatever breaks a rule ends the process. The file
CASE then describes the last mutant. Prints a JSON object that counts the outcomes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from s2moe.engine.native import Library, NativeError, Status
from s2moe.engine.native_experts import Experts, model_layout

from gguf_bytes import GgufFile
from header_mutants import mutant

SECONDS_PER_CASE = 5
EXTRA_BYTES = 256 << 20


class BrokenPromiseError(Exception):
    """The library answered with what s2moe.h rules out."""


def main(file: str, case_file: str, first: str, count: str, model: str = "") -> None:
    path = Path(file)
    base = GgufFile.read(path)
    library = Library()
    _limit_address_space()
    outcomes: Counter[str] = Counter()
    with Path(case_file).open("w") as note:
        for number in range(int(first), int(first) + int(count)):
            case = mutant(base, number)
            note.seek(0)
            note.write(f"{case.description:200}")
            note.flush()
            path.write_bytes(case.header)
            os.truncate(path, case.size)
            signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_CASE)
            outcomes[_read(library, Path(model or file))] += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(outcomes))


def _read(library: Library, model: Path) -> str:
    """The outcome in a word."""
    try:
        _check_extents(model_layout(library, model))
        outcome = "layout"
    except NativeError as error:
        _require(error.status == Status.IO, f"layout: {error.status.name}: {error}")
        _require(".gguf" in error.message, f"no file is named: {error}")
        outcome = "IO"
    try:
        Experts(library, model).close()
    except NativeError as error:
        allowed = {Status.IO, Status.UNSUPPORTED} if outcome == "layout" else {Status.IO}
        _require(error.status in allowed, f"open: {error.status.name}: {error}")
        _require(bool(error.message), "an error without a message")
        return f"{outcome}, open {error.status.name}"
    _require(outcome == "layout", "a file without a layout was opened")
    return "opened"


def _check_extents(layout: dict[str, Any]) -> None:
    sizes = [Path(file["path"]).stat().st_size for file in layout["files"]]
    _require([file["size_bytes"] for file in layout["files"]] == sizes, "a file has another size")
    for layer in layout["layers"]:
        n_bytes = sum(part["bytes"] for part in layer["parts"])
        _require(layer["n_expert"] > 0 and layer["expert_bytes"] == n_bytes > 0, f"wrong sizes: {layer}")
        for part in layer["parts"]:
            end = part["offset"] + part["bytes"] * layer["n_expert"]
            _require(0 <= part["file"] < len(sizes) and part["bytes"] > 0, f"wrong part: {part}")
            _require(0 <= part["offset"] < end <= sizes[part["file"]], f"outside the file: {part}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BrokenPromiseError(otherwise)


def _limit_address_space() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(*sys.argv[1:])
