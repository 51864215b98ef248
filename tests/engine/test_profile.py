"""`s2moe profile`: what is counted, and what it says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_rig import Chat, EngineProcess

from s2moe.engine import messages as wire
from s2moe.engine.profile import RouterCounts

QUESTION = "What is the capital of France, and which river flows through it on its way to the sea?"
N_TOKENS = 16


def run_profile(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "s2moe.server", "profile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_counts_are_of_chosen_experts_alone() -> None:
    counts = RouterCounts(3, 4)
    unrouted = [-1, -1]
    counts.add(np.array([[[0, 1], [0, 3]], [[2, 1], [2, 1]], [unrouted, [3, 0]]], dtype=np.int32))
    counts.add(np.array([[[3, 0]], [[0, 1]], [unrouted]], dtype=np.int32))
    assert counts.rows([0, 1, 2]) == [[3, 1, 0, 2], [1, 3, 2, 0], [1, 0, 0, 1]]
    assert counts.rows([2]) == [[1, 0, 0, 1]]
    assert counts.n_tokens == 3


def test_list_is_what_the_expert_cache_counts_of_the_same_answer(
    tiny_model_path: Path,
    tmp_path: Path,
    spawn: Callable[[], EngineProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "hot.json"
    prompts.write_text(QUESTION + "\n")
    arguments = ["--model", tiny_model_path, "--prompts", prompts, "--out", out, "--max-tokens", N_TOKENS]
    done = run_profile(*arguments, "--ctx-size", 512)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}\n"
    assert f"1 of 1 prompts, {N_TOKENS - 1} tokens counted" in done.stderr
    assert QUESTION not in done.stderr + out.read_text()
    hot = json.loads(out.read_text())
    assert hot["tokens"] == N_TOKENS - 1
    assert [layer["layer"] for layer in hot["layers"]] == list(range(30))
    assert {(len(layer["counts"]), sum(layer["counts"])) for layer in hot["layers"]} == {
        (8, 2 * (N_TOKENS - 1))
    }

    monkeypatch.setenv("S2MOE_CACHE_DIR", str(tmp_path / "cache"))
    engine = spawn()
    assert isinstance(engine.load(tiny_model_path, n_ctx=512, keep_expert_counts=True), wire.Ready)
    Chat(engine).ask(("user", QUESTION), max_tokens=N_TOKENS)
    engine.send(wire.Shutdown())
    assert engine.process.wait(10) == 0
    (kept,) = (tmp_path / "cache" / "experts").iterdir()
    counted = json.loads(kept.read_text())
    # the last layer evaluates one token of a prompt, which the cache cannot tell from a decode
    assert counted.pop("layers")[:-1] == hot.pop("layers")[:-1]
    assert counted == hot


def test_a_smaller_memory_gives_the_same_list(tiny_model_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "Name three rivers."}\n{"messages": [{"role": "user", "content": "Hi"}]}\n'
    )
    lists = []
    for budget in ("auto", "300MiB"):
        out = tmp_path / f"{budget}.json"
        arguments = ["--model", tiny_model_path, "--prompts", prompts, "--out", out, "--max-tokens", 12]
        done = run_profile(*arguments, "--ctx-size", 512, "--memory-budget", budget)
        assert done.returncode == 0, done.stderr
        lists.append(out.read_text())
    assert lists[0] == lists[1]


def test_prompts_that_do_not_fit_are_passed_over_by_name(tiny_model_path: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "hot.json"
    prompts.write_text("word " * 2000 + "\nHi\n")
    arguments = ["--model", tiny_model_path, "--out", out, "--max-tokens", 4, "--ctx-size", 256]
    done = run_profile(*arguments, "--prompts", prompts)
    assert done.returncode == 0, done.stderr
    assert f"{prompts}:1: passed over: This model's maximum context length is 256" in done.stderr
    assert "word word" not in done.stderr
    assert json.loads(out.read_text())["tokens"] == 3

    out.unlink()
    prompts.write_text("word " * 2000)
    done = run_profile(*arguments, "--prompts", prompts)
    assert done.returncode == 1
    assert "s2moe: error: --prompts: none of the prompts could be answered" in done.stderr
    assert not out.exists()


def test_usage_errors_are_one_line(tmp_path: Path) -> None:
    model, prompts = tmp_path / "m.gguf", tmp_path / "p.txt"
    model.write_text("hello")
    prompts.write_text('Hi\n{"prompt": 5}\n')
    good = tmp_path / "good.txt"
    good.write_text("Hi\n")
    cases: list[tuple[list[object], int, str]] = [
        (["--prompts", prompts, "--model", model], 1, f"--prompts: {prompts}:2: `prompt` is not a text"),
        (["--prompts", tmp_path / "none", "--model", model], 1, "none cannot be read: No such file"),
        (["--prompts", good, "--model", model, "--out", tmp_path], 1, "is a directory; name a file"),
        (["--prompts", good, "--model", model, "--out", tmp_path / "no/x"], 1, "no is not a directory"),
        (["--prompts", good, "--model", model, "--out", tmp_path / "o"], 1, "is not a GGUF file"),
        (["--prompts", good, "--model", tmp_path / "x", "--out", tmp_path / "o"], 1, "does not exist"),
        (["--prompts", good], 2, "--model"),
        (["--prompts", good, "--model", model, "--max-tokens", 0], 2, "at least 1"),
        (["--prompts", good, "--model", model, "--memory-budget", "0"], 2, "--memory-budget"),
        (["--prompts", good, "--model", model, "--memory-budget", "much"], 2, "not a size"),
    ]
    for arguments, code, reason in cases:
        done = run_profile(*arguments)
        assert done.returncode == code, done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("s2moe: error: ")
        assert reason in last
        assert done.stdout == ""
    assert not (tmp_path / "o").exists()


def test_budget_below_the_floor_is_refused_with_the_arithmetic(tiny_model_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hi\n")
    done = run_profile(
        *(
            "--model",
            tiny_model_path,
            "--prompts",
            prompts,
            "--out",
            tmp_path / "o",
            "--memory-budget",
            "50MiB",
        )
    )
    assert done.returncode == 1
    assert "--memory-budget gives 50 MiB" in done.stderr.splitlines()[-1]
