"""The hot list of the method `static`: the best there is, made of the very answers that are measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from s2moe.bench.prompts import prompts
from s2moe.bench.workload import N_CTX


class HotListError(Exception):
    """`s2moe profile` failed; the message ends with its own."""


def write_prompts(path: Path, workloads: Sequence[str], n_prompts: int) -> None:
    """The first n_prompts of each of the workloads, as `s2moe profile` reads them."""
    lines = (
        json.dumps({"messages": messages})
        for workload in workloads
        for messages in prompts(workload)[:n_prompts]
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_hot_list(
    model: Path,
    work: Path,
    *,
    workloads: Sequence[str],
    n_prompts: int,
    n_tokens: int,
    say: Callable[[str], None],
) -> Path:
    """Runs `s2moe profile`, with all memory, over what the grid asks, and returns the list, which is in
    `work`. Raises HotListError."""
    asked, out = work / "hot-list-prompts.jsonl", work / "hot-list.json"
    write_prompts(asked, workloads, n_prompts)
    say(f"profiles {len(workloads) * n_prompts} answers for the hot list of the method static")
    command = [str(Path(sys.executable).with_name("s2moe")), "profile", "--model", str(model)]
    command += ["--prompts", str(asked), "--out", str(out)]
    command += ["--max-tokens", str(n_tokens), "--ctx-size", str(N_CTX)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise HotListError("\n  ".join(["s2moe profile failed", *result.stderr.strip().splitlines()[-3:]]))
    return out
