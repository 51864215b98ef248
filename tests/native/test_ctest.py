"""Runs the C++ tests, each as a test of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

BUILD_DIR = Path(__file__).parents[2] / "build" / "native" / "s2moe"


@pytest.mark.parametrize(
    "name",
    [
        "error_test",
        "moe_test",
        "decode_test",
        "sampler_test",
        "chat_test",
        "experts_test",
        "device_test",
        "speculation_test",
        "speculator_test",
        "gate_rule_test",
        "remap_rule_test",
        "slot_map_test",
        "cuda_op_test",
    ],
)
def test_cpp(name: str, random_model: Callable[[str], Path]) -> None:
    environment = {**os.environ, "S2MOE_TEST_MODEL": str(random_model("qwen3moe"))}
    command = [
        "ctest",
        "--test-dir",
        str(BUILD_DIR),
        "--output-on-failure",
        "--no-tests=error",
        "-R",
        f"^{name}$",
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_every_cpp_test_is_run_here() -> None:
    listing = subprocess.run(
        ["ctest", "--test-dir", str(BUILD_DIR), "-N", "-E", "-(asan|tsan)$|^cuda_(gate|slots)_test$"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "Total Tests: 13" in listing
