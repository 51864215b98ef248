"""`s2moe inspect`: what it finds, on the demo model and on every layout of experts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from expert_models import EXPERT_MODELS, SPLIT_MODELS, variant_of, write_expert_model

MIB = 1 << 20


def run_inspect(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "s2moe.server", "inspect", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def inspect(*arguments: object) -> dict[str, dict[str, object]]:
    result = run_inspect(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found: dict[str, dict[str, object]] = json.loads(result.stdout)
    return found


def test_demo_model_within_a_budget(tiny_model_path: Path) -> None:
    found = inspect(tiny_model_path, "--memory-budget", "330MiB", "--ctx", "1024")
    model, plan = found["model"], found["plan"]
    assert (model["architecture"], model["n_expert"], model["n_expert_used"]) == ("llama", 8, 2)
    assert model["n_moe_layer"] == 30
    assert model["file_bytes"] == tiny_model_path.stat().st_size
    # gate, up and down of 576 × 1536 values in blocks of 32 values and 18 bytes
    assert model["bytes_per_expert"] == {"min": 3 * 576 * 1536 // 32 * 18, "max": 3 * 576 * 1536 // 32 * 18}
    assert plan["budget_bytes"] == 330 * MIB
    pools = plan["pools"]
    assert isinstance(pools, dict)
    assert sum(pools.values()) == 330 * MIB
    # keys and values: 30 layers, 3 heads of 64 values of two bytes
    assert pools["kv"] == 2 * 30 * 3 * 64 * 2 * 1024
    assert plan["cliff_slots"] == 60
    assert 60 < int(str(plan["slots"])) < 240
    expected = found["expected"]
    assert 0 < expected["tokens_per_second"]["low"] <= expected["tokens_per_second"]["high"]  # type: ignore[index]
    assert float(str(found["measured"]["drive_bytes_per_second"])) > 1e6
    assert float(str(found["measured"]["memory_bytes_per_second"])) > 1e8
    assert found["reader"]["io"] == "direct"


def test_prompt_cache_is_part_of_the_plan(tiny_model_path: Path) -> None:
    budget = ("--memory-budget", "330MiB", "--ctx", "1024")
    pools = [
        inspect(tiny_model_path, *budget, *flags)["plan"]["pools"]
        for flags in ((), ("--prompt-cache-size", "0"), ("--prompt-cache-size", "5MiB"))
    ]
    automatic, none, chosen = (each["prompt_cache"] for each in pools)  # type: ignore[index]
    assert 0 < automatic < 5 * MIB == chosen
    assert none == 0


def test_text_names_what_the_plan_consists_of(tiny_model_path: Path) -> None:
    result = run_inspect(tiny_model_path, "--memory-budget", "330MiB", "--ctx", "1024")
    assert result.returncode == 0, result.stderr
    rows = {line[:14].strip(): line[15:] for line in result.stdout.splitlines()}
    assert list(rows) == [
        *("model", "architecture", "file", "experts", "dense weights", "KV cache", "compute"),
        *("prompt cache", "processes"),
        *("budget", "floor", "full", "slots", "cliff", "reads", "speed"),
    ]
    assert "8 per layer, 2 per token" in rows["experts"]
    assert re.search(r"[0-9.]+ to [0-9.]+ tokens per second", rows["speed"])


def test_budget_below_the_floor_is_shown_and_fails_with_the_sum(tiny_model_path: Path) -> None:
    result = run_inspect(tiny_model_path, "--memory-budget", "64MiB", "--json")
    assert result.returncode == 1
    found = json.loads(result.stdout)
    assert found["plan"]["fits"] is False
    assert found["expected"] is None
    result = run_inspect(tiny_model_path, "--memory-budget", "64MiB")
    assert result.returncode == 1
    assert "below the floor" in result.stdout
    assert re.fullmatch(
        r"s2moe: error: --memory-budget gives 64 MiB, but [^\n]* MiB dense weights [^\n]*\n", result.stderr
    )


def test_budget_above_the_machines_memory_is_a_warning(tiny_model_path: Path) -> None:
    result = run_inspect(tiny_model_path, "--memory-budget", "1000TiB")
    assert result.returncode == 0, result.stderr
    assert "`s2moe serve` refuses that on this machine" in result.stdout


def test_batch_size_is_the_one_asked_for(tiny_model_path: Path) -> None:
    own, chosen = (
        inspect(tiny_model_path, "--memory-budget", "330MiB", "--ctx", "1024", *flags)["plan"]
        for flags in ((), ("--batch-size", "48"))
    )
    assert chosen["n_batch"] == 48
    assert int(str(chosen["floor_bytes"])) > int(str(own["floor_bytes"])), "32 is the smallest one tried"


def test_without_a_budget_it_is_the_machines(tiny_model_path: Path) -> None:
    plan = inspect(tiny_model_path)["plan"]
    assert plan["slots"] == plan["experts"] == 240
    assert plan["budget_source"] != "--memory-budget"


@pytest.mark.parametrize("name", [*EXPERT_MODELS, *SPLIT_MODELS])
def test_every_layout_of_experts(tmp_path: Path, name: str) -> None:
    path = write_expert_model(tmp_path, name)
    variant = variant_of(name)
    found = inspect(path, "--ctx", "256")
    model = found["model"]
    assert model["n_expert"] == variant.n_expert
    assert model["n_expert_used"] == variant.n_expert_used
    assert model["n_moe_layer"] == len(variant.moe_layers)
    assert model["file_bytes"] == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert found["plan"]["experts"] == variant.n_expert * len(variant.moe_layers)


@pytest.mark.parametrize("content", [b"", b"text", b"GGUF", b"GGUF" + b"\xff" * 64])
def test_file_that_is_no_model_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    result = run_inspect(path)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"s2moe: error: [^\n]*m\.gguf[^\n]*\n", result.stderr)
    assert result.stderr.count("m.gguf") == 1


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    result = run_inspect(tmp_path / "absent.gguf")
    assert result.returncode == 1
    assert re.fullmatch(r"s2moe: error: [^\n]*absent\.gguf does not exist[^\n]*\n", result.stderr)


def test_context_larger_than_the_memory_is_one_line(tiny_model_path: Path) -> None:
    result = run_inspect(tiny_model_path, "--ctx", "9999999")
    assert result.returncode == 1
    assert re.fullmatch(r"s2moe: error: a context of 10000128 tokens needs [^\n]*\n", result.stderr)


def test_front_end_is_not_imported(tiny_model_path: Path) -> None:
    source = (
        "import sys\nfrom s2moe.server.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print(sorted({'fastapi', 'uvicorn', 'numpy', 'gguf'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", source, "inspect", str(tiny_model_path)],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert result.stdout.splitlines()[-1] == "[]"
