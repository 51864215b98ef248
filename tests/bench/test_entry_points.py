"""The commands `python -m s2moe.bench.…`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
WITHOUT_HTTPX = """\
import contextlib, io, json, runpy, sys
sys.modules["httpx"] = None
ends = {}
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_module(name, run_name="__main__")
        except SystemExit as end:
            ends[name] = end.code
        except ImportError as error:
            ends[name] = repr(error)
print(json.dumps(ends))
"""


def commands() -> list[str]:
    files = [path for path in BENCH.rglob("*.py") if "__main__" in path.read_text()]
    return [
        ".".join(["s2moe.bench", *path.relative_to(BENCH).with_suffix("").parts]).removesuffix(".__main__")
        for path in files
    ]


def test_without_httpx_each_is_one_line_that_names_the_remedy() -> None:
    names = commands()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HTTPX, *names], capture_output=True, text=True, check=True
    )
    ends = json.loads(done.stdout)
    assert set(ends) == set(names)
    stopped = {name for name, end in ends.items() if end != 0}  # the others need none
    assert stopped >= {"s2moe.bench.offload", "s2moe.bench.speculation", "s2moe.bench.gpu_slots"}
    for name in stopped:
        assert str(ends[name]).startswith("s2moe.bench: error: "), ends[name]
        assert str(ends[name]).endswith(": run `make setup-dev`")
        assert "\n" not in ends[name]
