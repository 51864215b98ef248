"""The engine process with an expert cache that is smaller than the model: what it reports and remembers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_rig import Chat, EngineProcess

from s2moe.engine import messages as wire

BUDGET_BYTES = 400 << 20
"""About two thirds of the experts of the tiny demo model fit beside the rest."""
N_LAYERS, N_EXPERTS, N_USED = 30, 8, 2
QUESTION = ("user", "Tell me a long story about a river and the people who live beside it.")

Spawn = Callable[[], EngineProcess]


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("S2MOE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "experts"


def load(spawn: Spawn, model: Path, **options: object) -> EngineProcess:
    engine = spawn()
    options.setdefault("keep_expert_counts", True)
    ready = engine.load(model, n_ctx=512, memory_budget_bytes=BUDGET_BYTES, **options)
    assert isinstance(ready, wire.Ready), ready
    return engine


def stop(engine: EngineProcess) -> None:
    engine.send(wire.Shutdown())
    assert engine.process.wait(10) == 0


def answer(engine: EngineProcess, n_tokens: int) -> tuple[list[wire.EngineStats], wire.Finished]:
    """The reports until the end of an answer, those of the idle time before it included."""
    engine.send(Chat(engine).request(QUESTION, max_tokens=n_tokens))
    received = engine.receive_until(wire.Finished, wire.Failed)
    assert isinstance(received[-1], wire.Finished), received[-1]
    return [each for each in received if isinstance(each, wire.EngineStats)], received[-1]


def next_stats(engine: EngineProcess) -> wire.EngineStats:
    stats = engine.receive_until(wire.EngineStats)[-1]
    assert isinstance(stats, wire.EngineStats)
    return stats


def activities(stats: list[wire.EngineStats]) -> Iterator[wire.ExpertActivity]:
    return (each.experts for each in stats if each.experts is not None)


def n_lookups(phase: wire.ExpertPhase) -> int:
    return phase.hits + phase.misses + phase.prefetched


def test_reports_and_the_requests_own_figures_agree(spawn: Spawn, tiny_model_path: Path) -> None:
    engine = load(spawn, tiny_model_path)
    first = next_stats(engine)
    assert first.expert_cache is not None
    assert first.expert_cache.io == "direct"
    assert 0 < first.expert_cache.capacity_bytes < BUDGET_BYTES
    pools = {pool.pool: pool for pool in first.memory_pools}
    assert sum(pool.budget_bytes for pool in pools.values()) <= BUDGET_BYTES
    assert pools["weights"].used_bytes > 40_000_000
    assert first.memory_total_bytes > first.memory_available_bytes > 0

    stats, finished = answer(engine, 24)
    timings = finished.timings
    prefill, decode = timings.prefill_experts, timings.decode_experts
    assert prefill is not None
    assert decode is not None
    assert decode.n_lookups == timings.n_decode_steps * N_LAYERS * N_USED
    assert N_LAYERS * N_USED < prefill.n_lookups <= N_LAYERS * N_EXPERTS
    assert 0 < prefill.n_misses <= prefill.n_lookups
    assert 0 < prefill.stall_seconds < timings.prefill_seconds
    assert decode.stall_seconds < timings.decode_seconds

    reported = list(activities(stats))
    assert sum(n_lookups(each.prefill) + n_lookups(each.decode) for each in reported) == (
        prefill.n_lookups + decode.n_lookups
    )
    assert sum(each.prefill.misses + each.decode.misses for each in reported) == (
        prefill.n_misses + decode.n_misses
    )
    n_bytes = sum(each.demand.n_bytes + each.prefetch.n_bytes for each in reported)
    assert n_bytes == prefill.read_bytes + decode.read_bytes > 0
    n_loads = sum(each.demand.n_loads + each.prefetch.n_loads + each.warmup.n_loads for each in reported)
    assert n_loads == sum(sum(each.load_duration_counts) for each in reported)
    last = stats[-1].expert_cache
    assert last is not None
    assert 0 < last.resident_experts <= last.capacity_experts < N_LAYERS * N_EXPERTS
    assert last.resident_bytes <= last.capacity_bytes


def test_next_run_is_warmed_by_what_this_one_used(
    spawn: Spawn, tiny_model_path: Path, cache_directory: Path
) -> None:
    engine = load(spawn, tiny_model_path)
    stats, finished = answer(engine, 24)
    stop(engine)
    assert sum(each.warmup.n_loads for each in activities(stats)) == 0
    (kept,) = cache_directory.iterdir()
    text = kept.read_text()
    assert json.loads(text)["tokens"] == finished.timings.n_decode_steps == 23
    assert "river" not in text

    engine = load(spawn, tiny_model_path)
    first = next_stats(engine).expert_cache
    assert first is not None
    # the warm-up is reported though no request runs
    n_warmed = 0
    last = first
    while last.resident_experts < last.capacity_experts:
        now = next_stats(engine)
        assert now.expert_cache is not None
        last = now.expert_cache
        n_warmed += 0 if now.experts is None else now.experts.warmup.n_loads
    assert n_warmed == last.resident_experts - first.resident_experts > 0


def test_first_request_does_not_wait_for_the_warm_up(
    spawn: Spawn, tiny_model_path: Path, cache_directory: Path
) -> None:
    engine = load(spawn, tiny_model_path)
    answer(engine, 24)
    stop(engine)
    engine = load(spawn, tiny_model_path)
    next_stats(engine)  # of the start, with the decode that tries the model out
    stats, finished = answer(engine, 4)
    assert finished.n_completion_tokens == 4
    # what was read on the way in the background is not charged to the request
    charged = finished.timings.prefill_experts, finished.timings.decode_experts
    n_bytes = sum(use.read_bytes for use in charged if use is not None)
    assert n_bytes == sum(each.demand.n_bytes + each.prefetch.n_bytes for each in activities(stats))


def test_counts_are_not_kept_when_told_so(spawn: Spawn, tiny_model_path: Path, cache_directory: Path) -> None:
    engine = load(spawn, tiny_model_path, keep_expert_counts=False)
    answer(engine, 4)
    stop(engine)
    assert not cache_directory.exists()


def test_start_without_requests_leaves_nothing(
    spawn: Spawn, tiny_model_path: Path, cache_directory: Path
) -> None:
    stop(load(spawn, tiny_model_path))
    assert not cache_directory.exists()


def test_list_of_another_model_refuses_the_start(spawn: Spawn, tiny_model_path: Path, tmp_path: Path) -> None:
    engine = load(spawn, tiny_model_path)
    answer(engine, 4)
    stop(engine)
    (kept,) = (tmp_path / "cache" / "experts").iterdir()
    listed = json.loads(kept.read_text())
    listed["model"]["fingerprint"] = "sha256:0"
    listed["model"]["name"] = "Another"
    path = tmp_path / "hot.json"
    path.write_text(json.dumps(listed))
    fatal = spawn().load(tiny_model_path, n_ctx=512, hot_experts_path=str(path))
    assert isinstance(fatal, wire.Fatal)
    assert fatal.code == "hot_experts_invalid"
    assert f"--hot-experts: {path} was written for another model, Another" in fatal.message
    assert not fatal.retryable


def test_static_policy_keeps_the_list_and_nothing_else(
    spawn: Spawn, tiny_model_path: Path, cache_directory: Path
) -> None:
    refused = spawn().load(
        tiny_model_path, n_ctx=512, memory_budget_bytes=BUDGET_BYTES, expert_policy="static"
    )
    assert isinstance(refused, wire.Fatal)
    assert refused.code == "hot_experts_missing"
    assert "--hot-experts" in refused.message

    engine = load(spawn, tiny_model_path)
    _, expected = answer(engine, 24)
    stop(engine)
    engine = load(spawn, tiny_model_path, expert_policy="static")
    n_hot = 0
    while True:
        now = next_stats(engine).expert_cache
        assert now is not None
        n_hot = now.capacity_experts - N_EXPERTS
        if now.resident_experts == n_hot:
            break
    stats, finished = answer(engine, 24)
    assert finished.n_completion_tokens == expected.n_completion_tokens == 24
    last = stats[-1].expert_cache
    assert last is not None
    assert last.resident_experts == n_hot > 0
    reported = list(activities(stats))
    assert sum(each.prefetch.n_loads + each.warmup.n_loads + each.evictions for each in reported) == 0
    n_misses = sum(each.prefill.misses + each.decode.misses for each in reported)
    assert sum(each.demand.n_loads for each in reported) == n_misses > 0
    stop(engine)
    assert engine.process.stderr is not None
    assert b"--expert-policy static is for comparison" in engine.process.stderr.read()


def test_damaged_counts_do_not_keep_the_engine_from_starting(
    spawn: Spawn, tiny_model_path: Path, cache_directory: Path
) -> None:
    engine = load(spawn, tiny_model_path)
    answer(engine, 4)
    stop(engine)
    (kept,) = cache_directory.iterdir()
    kept.write_bytes(b"\x00damaged")
    engine = load(spawn, tiny_model_path)
    answer(engine, 4)
    stop(engine)
    assert json.loads(kept.read_text())["tokens"] == 3
    assert engine.process.stderr is not None
    lines = engine.process.stderr.read().decode().splitlines()
    assert len([line for line in lines if "expert counts of earlier runs are ignored" in line]) == 1
