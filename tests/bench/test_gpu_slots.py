"""The bench of a GPU's slots: what it makes of counters, and that it needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from s2moe.bench.answer import Answer
from s2moe.bench.gpu_slots import Counts, main, needed_bytes, summarise, table
from s2moe.bench.serving import Samples
from s2moe.engine.native import Library


def an_answer(n_tokens: int, seconds: float) -> Answer:
    return Answer("", 10, n_tokens, 0, 10**9, int((1 + seconds) * 1e9), 0, 0, 0)


def test_line() -> None:
    counts = Counts(
        lookups=1000,
        misses=100,
        copied_bytes=3.8e9,
        demand_bytes=3e9,
        copy_seconds=2.0,
        requests=38,
        synchronizations=19,
    )
    answers = [an_answer(21, 2.0), an_answer(19, 1.8)]
    line = summarise("2GiB", "exact", answers, counts, token_bytes=1e9, off_speed=5.0)
    assert line.tokens_per_second == pytest.approx(10.0)
    assert line.ratio == pytest.approx(2.0)
    assert line.hit_rate == pytest.approx(0.9)
    # the first token of each answer came with its prompt: 20 and 18 were decoded
    assert line.copied_bytes_per_token == pytest.approx(1e8)
    assert line.copied_gbps == pytest.approx(1.5)
    assert line.weights_gbps == pytest.approx(10.0)
    assert (line.requests_per_token, line.synchronizations_per_token) == (1.0, 0.5)
    assert "| 1.5 (6 %) | 10.0 (1 %) |" in table([line], 25.0, 1000.0)
    assert summarise("", "off", answers, counts, token_bytes=1, off_speed=0).ratio == 1


def test_counts_are_differences_of_what_decode_did() -> None:
    text = """
s2moe_expert_cache_lookups_total{result="hit",phase="decode"} 30
s2moe_expert_cache_lookups_total{result="miss",phase="decode"} 10
s2moe_expert_cache_lookups_total{result="miss",phase="prefill"} 99
s2moe_expert_cache_load_bytes_total{source="host",trigger="demand"} 505
s2moe_expert_cache_load_bytes_total{source="host",trigger="prefetch"} 6
s2moe_expert_cache_load_bytes_total{source="disk",trigger="demand"} 1000
s2moe_gpu_demand_bytes_total{phase="prefill"} 500
s2moe_gpu_demand_bytes_total{phase="decode"} 5
s2moe_gpu_copy_seconds_total{phase="prefill"} 60
s2moe_gpu_copy_seconds_total{phase="decode"} 0.25
s2moe_gpu_host_requests_total{phase="prefill"} 70
s2moe_gpu_host_requests_total{phase="decode"} 3
s2moe_gpu_synchronizations_total{phase="prefill"} 80
s2moe_gpu_synchronizations_total{phase="decode"} 4
"""
    counts = Counts.of(Samples(text))
    assert counts == Counts(40, 10, 11, 5, 0.25, 3, 4)
    assert counts.since(Counts(1, 1, 1, 1, 0, 1, 1)) == Counts(39, 9, 10, 4, 0.25, 2, 3)


def test_needed_bytes_are_those_of_one_token() -> None:
    layers = [{"expert_bytes": 10, "n_expert": 64}, {"expert_bytes": 20, "n_expert": 2}]
    assert needed_bytes({"dense_bytes": 7, "n_expert_used": 8, "layers": layers}) == 7 + 80 + 40


def test_no_gpu_is_said(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if Library().build_info()["cuda"]:
        pytest.skip("this build has CUDA: a GPU may answer")
    assert main(["--model", str(tiny_model_path), "--budgets", "1GiB"]) == 1
    assert "--device cuda, but this build has no CUDA" in capsys.readouterr().err
