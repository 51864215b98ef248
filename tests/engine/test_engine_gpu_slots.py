"""The engine with slots for experts on a GPU, which the CPU plays: what it plans, answers and reports."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from engine_rig import Chat
from fake_driver import ORIN, RTX_4090
from gpu_rig import MIB, QUESTION, Start, answer, last_cache, load, refusal

from s2moe.engine import messages as wire
from s2moe.engine.plan import show

from undraftable_models import write_dense_model

N_LAYERS, N_EXPERTS, N_USED = 30, 8, 2
EXPERT_BYTES = 3 * 576 * 1536 * 18 // 32
BETWEEN_BYTES = 512 * N_USED * (3 * 1536 + 576) * 4
"""What experts that compute 512 tokens hold between their matrices."""


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S2MOE_CACHE_DIR", str(tmp_path / "cache"))


def test_text_does_not_depend_on_slots(start: Start, tiny_model_path: Path) -> None:
    texts = set()
    for slots, vram_bytes in (("host", 60 * MIB), ("host-unpinned", 100 * MIB), ("host", 500 * MIB)):
        engine = start(slots=slots, free_bytes=1 << 30)
        load(engine, tiny_model_path, vram_budget_bytes=vram_bytes)
        rounds = []
        for _ in range(2):  # the second evaluates the end of the prompt alone, which may round otherwise
            text, finished, stats = answer(engine)
            rounds.append(text)
        texts.add(tuple(rounds))
        cache = last_cache(stats)
        assert cache.gpu is not None
        assert cache.gpu.capacity_bytes <= vram_bytes
        assert cache.gpu.resident_bytes <= cache.gpu.capacity_bytes
        assert cache.tier == ("pinned" if slots == "host" else "pageable")
        decode = finished.timings.decode_experts
        assert decode is not None
        assert decode.n_lookups == finished.timings.n_decode_steps * N_LAYERS * N_USED
        if vram_bytes == 500 * MIB:
            assert cache.gpu.capacity_experts == N_LAYERS * N_EXPERTS
            assert decode.n_misses == 0
        else:
            assert decode.n_misses > 0
    assert len(texts) == 1


def test_speculation_gives_the_same_text(start: Start, tiny_model_path: Path) -> None:
    engine = start(free_bytes=1 << 30)
    load(engine, tiny_model_path, vram_budget_bytes=150 * MIB, speculation=wire.Speculation())
    texts = []
    off, exact = wire.Speculation(method="off"), wire.Speculation(preset="exact", adaptive=False)
    for speculation in (off, off, exact):  # the first evaluates the whole prompt
        text, finished, _ = answer(engine, speculation=speculation)
        texts.append(text)
    assert texts[1] == texts[2]
    report = finished.timings.speculation
    assert report is not None
    assert report.n_drafted > 0


def test_reports_agree(start: Start, tiny_model_path: Path) -> None:
    engine = start(free_bytes=1 << 30)
    ready = load(engine, tiny_model_path, vram_budget_bytes=150 * MIB)
    assert ready.plan is not None
    assert any(RTX_4090.name in line and "slots" in line for line in ready.plan.lines)
    assert [each.kind for each in ready.model.devices] == ["cuda"]
    _, finished, stats = answer(engine)
    activities = [each.experts for each in stats if each.experts is not None]
    for phase in ("prefill", "decode"):
        n_misses = sum(getattr(each, phase).misses for each in activities)
        shares = [getattr(each.gpu, phase) for each in activities]
        assert sum(each.demand.n_loads for each in shares) == n_misses > 0
        assert sum(each.demand.n_bytes for each in shares) == n_misses * EXPERT_BYTES
        assert 0 < sum(each.requests for each in shares) <= n_misses
        # without drafts and the gate: the ends of decodes, and an upload before them at most
        assert sum(each.synchronizations for each in shares) > 0
    n_waits = sum(each.gpu.decode.synchronizations for each in activities)
    assert finished.timings.n_decode_steps <= n_waits <= 2 * (finished.timings.n_decode_steps + 2)
    assert sum(each.gpu.evictions for each in activities) > 0
    # the host's memory holds all: nothing is read twice
    assert sum(each.demand.n_loads for each in activities) <= N_LAYERS * N_EXPERTS
    stall = finished.timings.decode_experts.stall_seconds if finished.timings.decode_experts else 0
    assert 0 < stall < finished.timings.decode_seconds


def test_failed_read_ends_the_answer_and_nothing_else(
    start: Start, tiny_model_path: Path, tmp_path: Path
) -> None:
    """The GPU waits for an expert that will never come, and is let go on."""
    model = tmp_path / "m.gguf"
    shutil.copyfile(tiny_model_path, model)
    engine = start(free_bytes=1 << 30)
    load(engine, model, vram_budget_bytes=100 * MIB)
    n_bytes = model.stat().st_size
    os.truncate(model, n_bytes // 2)
    chat = Chat(engine)
    failed = chat.fail(QUESTION)
    assert "restore the file" in failed.message
    assert chat.fail(QUESTION).code == failed.code
    assert engine.process.poll() is None


@pytest.mark.parametrize(("n_batch", "n_tokens"), [(2048, 512), (64, 64)])
def test_what_experts_hold_between_their_matrices_is_planned(
    start: Start, tiny_model_path: Path, n_batch: int, n_tokens: int
) -> None:
    """Nothing else counts here, where weights and buffers are the CPU's. A context has 512 tokens."""
    ready = load(start(free_bytes=1 << 30), tiny_model_path, vram_budget_bytes=150 * MIB, n_batch=n_batch)
    assert ready.plan is not None
    n_bytes = n_tokens * N_USED * (3 * 1536 + 576) * 4
    assert any(f"model without experts, KV and buffers {show(n_bytes)}," in line for line in ready.plan.lines)


def test_layers_are_not_divided_among_gpus(start: Start, tiny_model_path: Path) -> None:
    """Two GPUs whose free memory together holds the model, but not when each has buffers and ends with room
    for less than a layer."""
    whole_bytes = N_LAYERS * N_EXPERTS * EXPERT_BYTES + BETWEEN_BYTES
    more_bytes = N_EXPERTS * EXPERT_BYTES + BETWEEN_BYTES
    for spare_bytes, fits in ((more_bytes // 2, False), (more_bytes + 2 * MIB, True)):
        engine = start(RTX_4090, RTX_4090, free_bytes=256 * MIB + (whole_bytes + spare_bytes) // 2)
        assert (load(engine, tiny_model_path).plan is None) == fits


def test_whole_model_without_room_names_the_way_to_slots(start: Start, tiny_model_path: Path) -> None:
    fatal = refusal(start(free_bytes=8 << 30, whole_room_bytes=64 * MIB), tiny_model_path)
    assert fatal.code == "insufficient_memory"
    assert "memory ran out" in fatal.message
    n_mib = int(re.findall(r"give --vram-budget ([0-9]+)MiB or less", fatal.message)[0])
    load(start(free_bytes=8 << 30), tiny_model_path, vram_budget_bytes=n_mib * MIB)


def test_dense_model_without_room_is_not_sent_to_slots(start: Start, tmp_path: Path) -> None:
    dense = write_dense_model(tmp_path / "dense.gguf")
    fatal = refusal(start(free_bytes=8 << 30, whole_room_bytes=1), dense)
    assert fatal.code == "insufficient_memory"
    assert "--vram-budget" not in fatal.message
    assert "--device cpu" in fatal.message


def test_whole_model_where_it_fits(start: Start, tiny_model_path: Path) -> None:
    engine = start(free_bytes=8 << 30)
    ready = load(engine, tiny_model_path)
    assert ready.plan is None
    _, _, stats = answer(engine)
    assert stats[-1].expert_cache is None


def test_slots_where_it_does_not(start: Start, tiny_model_path: Path) -> None:
    engine = start(free_bytes=(256 + 150) * MIB)
    ready = load(engine, tiny_model_path)
    assert ready.plan is not None
    _, _, stats = answer(engine)
    gpu = last_cache(stats).gpu
    assert gpu is not None
    assert 100 * MIB < gpu.capacity_bytes <= 150 * MIB


def test_shared_memory_is_counted_once(start: Start, tiny_model_path: Path) -> None:
    """Slots, the cache that feeds them and all else keep the one budget."""
    engine = start(ORIN)
    ready = load(engine, tiny_model_path, memory_budget_bytes=400 * MIB)
    assert ready.plan is not None
    assert sum(pool.budget_bytes for pool in ready.plan.pools) <= 400 * MIB
    _, _, stats = answer(engine)
    cache = last_cache(stats)
    assert cache.gpu is not None
    expert_pool = next(pool for pool in ready.plan.pools if pool.pool == "expert_cache")
    assert cache.capacity_bytes + cache.gpu.capacity_bytes <= expert_pool.budget_bytes
    assert cache.capacity_experts == N_EXPERTS
    assert cache.gpu.capacity_experts > 2 * N_EXPERTS


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"vram_budget_bytes": MIB}, "budget_too_small", "give --vram-budget"),
        ({"vram_budget_bytes": 1 << 50}, "budget_too_large", "--vram-budget gives"),
        ({"vram_budget_bytes": 2 << 30}, "insufficient_memory", "free beside a reserve"),
        ({"expert_trace_path": "t.jsonl"}, "invalid_setting", "--expert-trace"),
        ({"expert_policy": "static"}, "invalid_setting", "--expert-policy"),
        ({"speculation": wire.Speculation(shared_context=False)}, "invalid_setting", "KV cache of their own"),
    ],
)
def test_refusals(
    start: Start, tiny_model_path: Path, options: dict[str, object], code: str, text: str
) -> None:
    options.setdefault("vram_budget_bytes", 150 * MIB)
    fatal = refusal(start(free_bytes=1 << 30), tiny_model_path, **options)
    assert fatal.code == code
    assert text in fatal.message


def test_gpu_without_room_says_what_is_needed(start: Start, tiny_model_path: Path) -> None:
    fatal = refusal(start(free_bytes=257 * MIB), tiny_model_path)
    assert fatal.code == "insufficient_memory"
    assert "what the GPU has free gives 1.00 MiB" in fatal.message


@pytest.mark.parametrize("option", ["memory_budget_bytes", "vram_budget_bytes"])
def test_dense_model_has_no_cache(start: Start, tmp_path: Path, option: str) -> None:
    fatal = refusal(start(), write_dense_model(tmp_path / "dense.gguf"), **{option: 400 * MIB})
    assert fatal.code == "invalid_setting"
    assert f"--{option.removesuffix('_bytes').replace('_', '-')} is not possible" in fatal.message


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ("host-unpinned", ["cannot read the expert cache where it is", "told not to", "copied once more"]),
        ("host-watched", ["the driver ends what runs", "use another GPU for the display"]),
        ("host", []),
    ],
)
def test_what_a_gpu_cannot_do_is_said(
    slots: str, words: list[str], start: Start, tiny_model_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load(start(slots=slots), tiny_model_path, vram_budget_bytes=60 * MIB)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line.upper()]
    assert bool(warnings) == bool(words)
    assert all(word in warnings[0] for word in words)
