"""The engine with slots for experts on a GPU, which the CPU plays: what it plans, answers and reports."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_rig import Chat, EngineProcess
from fake_driver import ORIN, RTX_4090, build_driver, driver_environment

from s2moe.engine import messages as wire
from s2moe.engine.cuda_driver import CudaDevice

from undraftable_models import write_dense_model

MIB = 1 << 20
N_LAYERS, N_EXPERTS, N_USED = 30, 8, 2
SLOTS_ENGINE = Path(__file__).with_name("slots_engine.py")
QUESTION = ("user", "Tell me a long story about a river and the people who live beside it.")

Start = Callable[..., EngineProcess]


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S2MOE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def start(driver: Path) -> Iterator[Start]:
    engines: list[EngineProcess] = []

    def start_one(
        gpu: CudaDevice = RTX_4090, *, slots: str = "host", free_bytes: int = 100 * MIB
    ) -> EngineProcess:
        engine = EngineProcess(
            program=(str(SLOTS_ENGINE), slots, str(free_bytes)),
            environment={"LD_LIBRARY_PATH": str(driver.parent), **driver_environment([gpu])},
        )
        engines.append(engine)
        return engine

    yield start_one
    for engine in engines:
        engine.close()


def load(engine: EngineProcess, model: Path, **options: object) -> wire.Ready:
    ready = engine.load(model, device="cuda", n_ctx=512, **options)
    assert isinstance(ready, wire.Ready), ready
    return ready


def refusal(engine: EngineProcess, model: Path, **options: object) -> wire.Fatal:
    fatal = engine.load(model, device="cuda", n_ctx=512, **options)
    assert isinstance(fatal, wire.Fatal)
    return fatal


def answer(engine: EngineProcess, **options: object) -> tuple[str, wire.Finished, list[wire.EngineStats]]:
    engine.send(Chat(engine).request(QUESTION, max_tokens=40, **options))
    received = engine.receive_until(wire.Finished, wire.Failed)
    assert isinstance(received[-1], wire.Finished), received[-1]
    text = "".join(each.content for each in received if isinstance(each, wire.Step))
    return text, received[-1], [each for each in received if isinstance(each, wire.EngineStats)]


def last_cache(stats: list[wire.EngineStats]) -> wire.ExpertCache:
    cache = stats[-1].expert_cache
    assert cache is not None
    return cache


def test_text_does_not_depend_on_slots(start: Start, tiny_model_path: Path) -> None:
    texts = set()
    for slots, vram_bytes in (("host", 60 * MIB), ("host-unpinned", 100 * MIB), ("host", 400 * MIB)):
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
        if vram_bytes == 400 * MIB:
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
    gpu = [each.gpu for each in activities]
    n_misses = sum(each.prefill.misses + each.decode.misses for each in activities)
    assert sum(each.demand.n_loads for each in gpu) == n_misses > 0
    assert 0 < sum(each.requests for each in gpu) <= n_misses
    assert sum(each.demand.n_bytes for each in gpu) > n_misses * 100_000
    assert sum(each.evictions for each in gpu) > 0
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
        ({"vram_budget_bytes": 2 << 30}, "budget_too_large", "free beside a reserve"),
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
    assert fatal.code == "budget_too_small"
    assert "what the GPU has free gives 1.00 MiB" in fatal.message


@pytest.mark.parametrize("option", ["memory_budget_bytes", "vram_budget_bytes"])
def test_dense_model_has_no_cache(start: Start, tmp_path: Path, option: str) -> None:
    fatal = refusal(start(), write_dense_model(tmp_path / "dense.gguf"), **{option: 400 * MIB})
    assert fatal.code == "invalid_setting"
    assert f"--{option.removesuffix('_bytes').replace('_', '-')} is not possible" in fatal.message
