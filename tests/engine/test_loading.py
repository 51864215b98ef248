"""The engine within a memory budget: what it plans, what it then uses, and how it refuses."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_rig import Chat, EngineProcess

from s2moe.engine import messages as wire
from s2moe.engine.memory import MIB, resident_bytes

from expert_models import EXPERT_MODELS, write_expert_model

BUDGET_BYTES = 320 * MIB
"""The tiny demo model needs about 150 MiB and 346 MiB for all of its experts."""


def ready_of(engine: EngineProcess, model: Path, **options: object) -> wire.Ready:
    ready = engine.load(model, keep_expert_counts=False, **options)
    assert isinstance(ready, wire.Ready), ready
    return ready


def pools_of(plan: wire.Plan) -> dict[str, int]:
    return {pool.pool: pool.budget_bytes for pool in plan.pools}


def test_part_of_the_experts_is_served_within_the_budget(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    engine = spawn()
    plan = ready_of(engine, tiny_model_path, n_ctx=1024, memory_budget_bytes=BUDGET_BYTES).plan
    assert plan is not None
    assert plan.budget_bytes == BUDGET_BYTES
    assert plan.n_cycle_slots < plan.n_slots < plan.n_experts
    pools = pools_of(plan)
    assert sum(pools.values()) == BUDGET_BYTES  # nothing is left unused
    chat = Chat(engine)
    for content in ("Tell me a story about the sea. " * 20, "And now one about the moon."):
        engine.send(chat.request(("user", content), max_tokens=8))
        received = engine.receive_until(wire.Finished, wire.Failed)
        assert isinstance(received[-1], wire.Finished)
        assert resident_bytes(engine.process.pid) <= BUDGET_BYTES
    stats = [message for message in received if isinstance(message, wire.EngineStats)][-1]
    cache = stats.expert_cache
    assert cache is not None
    assert pools["expert_cache"] - 2 * MIB < cache.capacity_bytes <= pools["expert_cache"]
    # unused by then: the reserve, the prompt cache, compute buffers and slots that nobody needed
    unused = sum(pools[pool] for pool in ("reserve", "prompt_cache", "compute"))
    unused += cache.capacity_bytes - cache.resident_bytes
    assert stats.rss_bytes > BUDGET_BYTES - unused - 8 * MIB
    assert stats.memory_pressure_events == {}


def test_front_end_counts_towards_the_budget(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    alone, beside = (
        ready_of(
            spawn(), tiny_model_path, n_ctx=512, memory_budget_bytes=BUDGET_BYTES, front_end_bytes=front_end
        ).plan
        for front_end in (0, 64 * MIB)
    )
    assert alone is not None
    assert beside is not None
    difference = pools_of(alone)["expert_cache"] - pools_of(beside)["expert_cache"]
    assert difference == pytest.approx(64 * MIB, rel=0.2)


def test_slots_make_room_when_the_front_end_grows(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    engine = spawn()
    budget_bytes = resident_bytes() + BUDGET_BYTES
    ready_of(
        *(engine, tiny_model_path),
        n_ctx=1024,
        memory_budget_bytes=budget_bytes,
        front_end_bytes=resident_bytes(),
    )
    chat = Chat(engine)
    chat.ask(("user", "Tell me a story about the sea. " * 20), max_tokens=8)
    used_bytes = resident_bytes() + resident_bytes(engine.process.pid)
    ballast = b"x" * (budget_bytes - used_bytes + 20 * MIB)
    text, _ = chat.ask(("user", "Tell me a story about the moon. " * 20), max_tokens=8)
    engine.send(chat.request(("user", "And one about the sun."), max_tokens=8))
    received = engine.receive_until(wire.Finished, wire.Failed)
    assert isinstance(received[-1], wire.Finished)
    assert text
    assert resident_bytes() + resident_bytes(engine.process.pid) <= budget_bytes
    assert len(ballast) > 20 * MIB


def test_budget_is_capped_at_what_all_experts_need(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    engine = spawn()
    plan = ready_of(engine, tiny_model_path, n_ctx=512).plan
    assert plan is not None
    assert plan.n_slots == plan.n_experts == 8 * 30
    assert sum(pools_of(plan).values()) < plan.budget_bytes


def test_refused_budget_would_do_when_raised_to_what_the_refusal_says(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    fatal = spawn().load(tiny_model_path, n_ctx=512, n_batch=64, memory_budget_bytes=64 * MIB)
    assert isinstance(fatal, wire.Fatal)
    assert (fatal.code, fatal.retryable) == ("budget_too_small", False)
    (remedy,) = re.findall(r"give --memory-budget ([0-9]+)MiB", fatal.message)
    ready_of(spawn(), tiny_model_path, n_ctx=512, n_batch=64, memory_budget_bytes=int(remedy) * MIB)


def test_floor_of_a_comfortable_plan_is_served(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    comfortable = ready_of(spawn(), tiny_model_path, n_ctx=512, n_batch=0).plan
    assert comfortable is not None
    assert "(batches of 512)" in comfortable.lines[0]
    floor_bytes = comfortable.floor_bytes
    plan = ready_of(spawn(), tiny_model_path, n_ctx=512, n_batch=0, memory_budget_bytes=floor_bytes).plan
    assert plan is not None
    assert "(batches of 32)" in plan.lines[0]
    assert abs(plan.floor_bytes - floor_bytes) < 8 * MIB


def test_plan_comes_before_anything_is_loaded(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    engine = spawn()
    engine.send(wire.Configure(model_path=str(tiny_model_path), n_ctx=512, memory_budget_bytes=BUDGET_BYTES))
    received = [m for m in engine.receive_until(wire.Ready) if isinstance(m, wire.LoadProgress)]
    plans = [message.plan for message in received if message.plan is not None]
    phases = [message.phase for message in received]
    (plan,) = plans
    assert plan.budget_bytes == BUDGET_BYTES
    assert plan.lines[0].startswith("memory budget 320 MiB (--memory-budget)")
    assert "model" not in phases[: [m.plan is not None for m in received].index(True)]


def test_batches_shrink_only_where_the_user_left_them_open(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    left_open = ready_of(spawn(), tiny_model_path, n_ctx=512, n_batch=0, memory_budget_bytes=200 * MIB).plan
    chosen = ready_of(spawn(), tiny_model_path, n_ctx=512, n_batch=512, memory_budget_bytes=200 * MIB).plan
    assert left_open is not None
    assert chosen is not None
    assert pools_of(left_open)["compute"] < pools_of(chosen)["compute"] / 1.5
    assert "(batches of 512)" in chosen.lines[0]
    assert "(batches of 512)" not in left_open.lines[0]


def test_dense_weights_do_not_stay_in_the_page_cache(
    spawn: Callable[[], EngineProcess], tiny_model_path: Path
) -> None:
    ready_of(spawn(), tiny_model_path, n_ctx=512, memory_budget_bytes=BUDGET_BYTES)
    assert cached_bytes(tiny_model_path) < 8 * MIB


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_every_layout_of_experts_is_loaded_with_a_plan(
    spawn: Callable[[], EngineProcess], tmp_path: Path, name: str
) -> None:
    path = write_expert_model(tmp_path, name)
    plan = ready_of(spawn(), path, n_ctx=256).plan
    assert plan is not None
    assert plan.n_slots == plan.n_experts > 0


def cached_bytes(path: Path) -> int:
    """How much of a file the page cache holds."""
    n_bytes = path.stat().st_size
    pages = (ctypes.c_ubyte * (-(-n_bytes // mmap.PAGESIZE)))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), n_bytes, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, dtype=np.uint8)
        status = ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(n_bytes), pages)
        del view
    assert status == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
