"""What a GPU's memory pays for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from s2moe.engine.gpu_plan import DenseNeeds, GpuMemoryError, GpuPlan, free_budget
from s2moe.engine.memory import MIB, Budget

GIB = 1 << 30
PLAN = GpuPlan(
    name="RTX 4090",
    budget=Budget(22 * GIB, "what the GPU has free"),
    dense=DenseNeeds(weights_bytes=2 * GIB, kv_bytes=GIB, compute_bytes=GIB),
    expert_bytes=60 * GIB,
    n_experts=6000,
    floor_bytes=GIB,
    gpu_bytes=(22 * GIB,),
    piece_bytes=2 * GIB,
)


def test_something_is_left_to_others() -> None:
    assert free_budget(24 * GIB, 24 * GIB).n_bytes == 24 * GIB - 24 * GIB // 20
    assert free_budget(GIB, 2 * GIB).n_bytes == GIB - 256 * MIB
    assert free_budget(100 * MIB, 2 * GIB).n_bytes == 0


def test_slots_get_what_is_left() -> None:
    assert not PLAN.holds_all
    assert PLAN.capacity_bytes == 18 * GIB
    assert PLAN.n_slots == 1800
    assert "1800 of 6000 experts (30 %)" in PLAN.line()
    PLAN.check()


def test_no_more_slots_than_experts() -> None:
    roomy = replace(PLAN, expert_bytes=10 * GIB)
    assert roomy.holds_all
    assert roomy.n_slots == roomy.n_experts
    assert roomy.capacity_bytes == 18 * GIB
    assert "(all)" in roomy.line()


def test_a_model_without_slots_may_lie_on_all_gpus() -> None:
    assert replace(PLAN, gpu_bytes=(64 * GIB,)).holds_all
    assert not replace(PLAN, gpu_bytes=(64 * GIB - 1,)).holds_all
    # each further GPU has compute buffers of its own, and may end with room for less than a layer
    assert replace(PLAN, gpu_bytes=(32 * GIB, 35 * GIB)).holds_all
    assert not replace(PLAN, gpu_bytes=(32 * GIB, 35 * GIB - 1)).holds_all
    assert replace(PLAN, gpu_bytes=(20 * GIB, 20 * GIB, 30 * GIB)).holds_all
    assert not replace(PLAN, gpu_bytes=(20 * GIB, 20 * GIB, 30 * GIB - 1)).holds_all


@pytest.mark.parametrize("n_gpus", [2, 3, 4])
@pytest.mark.parametrize("n_layer", [5, 24, 48])
def test_no_gpu_gets_more_layers_than_it_holds(n_gpus: int, n_layer: int) -> None:
    """llama.cpp deals layers to equal GPUs in runs of floor or ceil(n_layer / n_gpus)."""
    layer = 3 * GIB
    plan = replace(
        PLAN,
        dense=DenseNeeds(weights_bytes=GIB * n_layer, kv_bytes=0, compute_bytes=GIB),
        expert_bytes=2 * GIB * n_layer,
        piece_bytes=layer,
    )
    needed = -(-n_layer // n_gpus) * layer + GIB
    for gpu_bytes in range(needed - 2 * layer, needed + 2 * layer, GIB // 4):
        if replace(plan, gpu_bytes=(gpu_bytes,) * n_gpus).holds_all:
            assert gpu_bytes >= needed
    assert replace(plan, gpu_bytes=(needed + layer,) * n_gpus).holds_all


def test_remedy_for_a_model_that_has_no_room_as_a_whole() -> None:
    assert "--vram-budget 22528MiB or less" in PLAN.remedy
    assert "--vram-budget" not in replace(PLAN, budget=Budget(4 * GIB, "")).remedy


def test_less_than_a_layer_is_refused() -> None:
    replace(PLAN, budget=Budget(5 * GIB, "")).check()
    with pytest.raises(GpuMemoryError, match=r"free some of it.*--device cpu"):
        replace(PLAN, budget=Budget(5 * GIB - 1, "what the GPU has free")).check()
    with pytest.raises(GpuMemoryError, match="give --vram-budget 5120MiB or more"):
        replace(PLAN, budget=Budget(GIB, "--vram-budget", explicit=True)).check()


def test_remedy_names_what_set_the_budget() -> None:
    """Where a GPU shares the machine's memory that is the memory budget."""
    with pytest.raises(GpuMemoryError, match=r"^--memory-budget gives.*give --memory-budget 5120MiB or more"):
        replace(PLAN, budget=Budget(GIB, "--memory-budget", explicit=True)).check()


def test_memory_plan_may_leave_less() -> None:
    limited = PLAN.limited_to(2 * GIB)
    assert limited.capacity_bytes == 2 * GIB
    assert PLAN.limited_to(1 << 50) == PLAN


def test_nothing_left() -> None:
    full = replace(PLAN, budget=Budget(GIB, ""))
    assert (full.capacity_bytes, full.n_slots) == (0, 0)
