"""How a budget is divided, what is refused, and what speed is promised."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2moe.engine.expected_speed import Machine, expected_speed
from s2moe.engine.memory import MIB, Budget, Supply
from s2moe.engine.plan import (
    AUTO_PROMPT_CACHE,
    MAX_AUTO_PROMPT_CACHE_BYTES,
    RESERVE_BYTES,
    RESERVE_DIVISOR,
    START_VARIATION_BYTES,
    BudgetTooLargeError,
    BudgetTooSmallError,
    MemoryPlan,
    ModelLayout,
    Needs,
    show,
    show_flag,
)

LAYOUT: dict[str, Any] = {
    "architecture": "qwen3moe",
    "name": "Mixed",
    "n_layer": 7,
    "n_ctx_train": 4096,
    "n_vocab": 1000,
    "n_expert": 16,
    "n_expert_used": 4,
    "files": [{"path": "a.gguf", "size_bytes": 400}, {"path": "b.gguf", "size_bytes": 600}],
    "file_bytes": 1000,
    "dense_bytes": 100,
    "expert_bytes": 900,
    "tensor_types": {"q4_K": 800, "f32": 200},
    # four layers of one size and two of another; a seventh is dense
    "classes": [
        {"slot_bytes": 2 * MIB, "n_layers": 4, "n_experts": 64},
        {"slot_bytes": 3 * MIB, "n_layers": 2, "n_experts": 32},
    ],
}
DENSE: dict[str, Any] = {**LAYOUT, "n_expert": 0, "n_expert_used": 0, "classes": [], "expert_bytes": 0}
NEEDS = Needs(
    front_end_bytes=50 * MIB,
    engine_bytes=40 * MIB,
    weights_bytes=100 * MIB,
    kv_bytes=30 * MIB,
    compute_bytes=20 * MIB,
    n_ctx=4096,
    n_batch=512,
)
FIXED_BYTES = 240 * MIB
ALL_SLOTS_BYTES = 64 * 2 * MIB + 32 * 3 * MIB
FLOOR_SLOTS_BYTES = 16 * 2 * MIB + 16 * 3 * MIB
CYCLE_BYTES = 4 * 4 * 2 * MIB + 2 * 4 * 3 * MIB


def plan_of(
    budget_bytes: int,
    *,
    layout: dict[str, Any] = LAYOUT,
    explicit: bool = True,
    prompt_cache_size: int = 0,
) -> MemoryPlan:
    source = "--memory-budget" if explicit else "the limit in /sys/fs/cgroup/memory.max"
    return MemoryPlan(
        layout=ModelLayout.from_json(layout),
        budget=Budget(budget_bytes, source, explicit=explicit),
        needs=NEEDS,
        slots_floor_bytes=FLOOR_SLOTS_BYTES if layout["classes"] else 0,
        prompt_cache_size=prompt_cache_size,
    )


def test_sizes_of_a_model_with_layers_of_two_sizes() -> None:
    layout = ModelLayout.from_json(LAYOUT)
    assert (layout.n_moe_layer, layout.n_experts_total, layout.cycle_slots) == (6, 96, 24)
    assert (layout.all_slots_bytes, layout.floor_slots_bytes) == (ALL_SLOTS_BYTES, FLOOR_SLOTS_BYTES)
    assert layout.cycle_bytes == CYCLE_BYTES
    assert layout.files == ("a.gguf", "b.gguf")


def test_slots_get_all_that_nothing_else_needs() -> None:
    plan = plan_of(400 * MIB)
    reserve = RESERVE_BYTES + 400 * MIB // RESERVE_DIVISOR  # divides evenly
    assert plan.capacity_bytes == 400 * MIB - FIXED_BYTES - reserve
    assert sum(plan.pools.values()) == 400 * MIB


def test_slots_get_no_more_than_all_experts_need() -> None:
    plan = plan_of(10_000 * MIB)
    assert plan.all_resident
    assert plan.capacity_bytes == ALL_SLOTS_BYTES
    assert plan.n_slots == 96
    assert sum(plan.pools.values()) < 500 * MIB


@given(st.integers(0, 2000 * MIB))
def test_no_budget_is_exceeded_and_none_is_left_unused(budget_bytes: int) -> None:
    plan = plan_of(budget_bytes)
    used_bytes = sum(plan.pools.values())
    if plan.fits:
        assert plan.capacity_bytes >= FLOOR_SLOTS_BYTES
        assert used_bytes == budget_bytes or (used_bytes < budget_bytes and plan.all_resident)
    assert plan.fits == (budget_bytes >= plan.least_bytes)
    assert plan.floor_bytes == plan.least_bytes + START_VARIATION_BYTES
    assert plan.all_resident == (budget_bytes >= plan.full_bytes - START_VARIATION_BYTES)


@given(st.integers(0, 4000 * MIB))
def test_automatic_prompt_cache_takes_only_what_experts_can_spare(budget_bytes: int) -> None:
    without = plan_of(budget_bytes)
    plan = plan_of(budget_bytes, prompt_cache_size=AUTO_PROMPT_CACHE)
    n_bytes = plan.prompt_cache_bytes
    assert 0 <= n_bytes <= MAX_AUTO_PROMPT_CACHE_BYTES
    assert 10 * n_bytes <= max(0, without.left_bytes - FLOOR_SLOTS_BYTES)
    assert (plan.fits, plan.below_cliff, plan.all_resident) == (
        *(without.fits, without.below_cliff, without.all_resident),
    )
    assert (plan.floor_bytes, plan.cliff_bytes, plan.full_bytes) == (
        *(without.floor_bytes, without.cliff_bytes, without.full_bytes),
    )
    if plan.fits:
        used_bytes = sum(plan.pools.values())
        assert used_bytes == budget_bytes or (used_bytes < budget_bytes and plan.all_resident)
        assert plan.pools["prompt_cache"] == n_bytes


def test_automatic_prompt_cache_is_a_tenth_of_what_is_left_beyond_the_floor() -> None:
    between = plan_of(400 * MIB, prompt_cache_size=AUTO_PROMPT_CACHE)
    left = plan_of(400 * MIB).left_bytes
    assert between.prompt_cache_bytes == (left - FLOOR_SLOTS_BYTES) // 10 > 5 * MIB
    assert between.capacity_bytes == left - between.prompt_cache_bytes
    assert f"prompt cache {show(between.prompt_cache_bytes)}" in between.lines()[0]
    dense = plan_of(440 * MIB, layout=DENSE, prompt_cache_size=AUTO_PROMPT_CACHE)
    assert dense.prompt_cache_bytes == plan_of(440 * MIB, layout=DENSE).left_bytes // 10


def test_automatic_prompt_cache_is_at_most_two_contexts() -> None:
    plenty = plan_of(20_000 * MIB, prompt_cache_size=AUTO_PROMPT_CACHE)
    assert plenty.prompt_cache_bytes == 2 * plenty.needs.kv_bytes < MAX_AUTO_PROMPT_CACHE_BYTES


def test_chosen_prompt_cache_is_part_of_the_floor() -> None:
    without = plan_of(400 * MIB)
    plan = plan_of(400 * MIB, prompt_cache_size=32 * MIB)
    assert plan.pools["prompt_cache"] == plan.prompt_cache_bytes == 32 * MIB
    assert without.capacity_bytes - plan.capacity_bytes == 32 * MIB
    assert 32 * MIB <= plan.floor_bytes - without.floor_bytes <= 33 * MIB
    assert sum(plan.pools.values()) == 400 * MIB


@pytest.mark.parametrize("layout", [LAYOUT, DENSE])
@pytest.mark.parametrize("explicit", [True, False])
def test_chosen_prompt_cache_that_does_not_fit_is_refused(layout: dict[str, Any], explicit: bool) -> None:
    plan = plan_of(400 * MIB, layout=layout, explicit=explicit, prompt_cache_size=300 * MIB)
    assert plan.must_fit
    with pytest.raises(BudgetTooSmallError) as caught:
        plan.check()
    assert "300 MiB prompt cache" in str(caught.value)
    assert "a smaller --prompt-cache-size" in str(caught.value)


@pytest.mark.parametrize("layout", [LAYOUT, DENSE])
def test_least_budget_that_is_accepted(layout: dict[str, Any]) -> None:
    least_bytes = plan_of(0, layout=layout).least_bytes
    plan_of(least_bytes, layout=layout).check()
    with pytest.raises(BudgetTooSmallError):
        plan_of(least_bytes - 1, layout=layout).check()
    plan_of(least_bytes - 5, layout=layout).check(tolerance_bytes=5)


def test_floor_is_accepted_by_a_start_whose_processes_are_larger() -> None:
    plan = plan_of(plan_of(0).floor_bytes)
    # what is mapped more takes page tables
    more_bytes = START_VARIATION_BYTES - START_VARIATION_BYTES // RESERVE_DIVISOR - 1
    plan.with_needs(engine_bytes=NEEDS.engine_bytes + more_bytes).check()


BATCHES = {512: 90 * MIB, 256: 50 * MIB, 128: 20 * MIB, 64: 10 * MIB, 32: 5 * MIB}


def with_batches(budget_bytes: int, layout: dict[str, Any] = LAYOUT) -> MemoryPlan:
    return replace(plan_of(budget_bytes, layout=layout), batches=BATCHES).with_best_batch()


@given(st.integers(0, 800))
def test_floor_full_and_cliff_do_not_depend_on_the_batch_that_a_budget_chooses(budget: int) -> None:
    layout = {**LAYOUT, "n_expert_used": 14}
    plan = with_batches(budget * MIB, layout)
    other = with_batches(0, layout)
    assert (plan.floor_bytes, plan.full_bytes, plan.cliff_bytes) == (
        *(other.floor_bytes, other.full_bytes, other.cliff_bytes),
    )
    assert plan.fits == (budget * MIB >= other.least_bytes)
    assert plan.all_resident or budget * MIB < other.full_bytes
    assert not plan.below_cliff or budget * MIB < other.cliff_bytes


def test_cliff_with_the_batch_that_it_chooses_is_no_larger_than_needed() -> None:
    layout = {**LAYOUT, "n_expert_used": 14}
    cliff_bytes = with_batches(0, layout).cliff_bytes
    assert with_batches(cliff_bytes - START_VARIATION_BYTES - 1, layout).below_cliff
    (warning,) = with_batches(cliff_bytes - 8 * MIB, layout).warnings()
    assert f"from --memory-budget {show_flag(cliff_bytes)} on" in warning


def supplied(budget: int, limit: int, available: int, *, explicit: bool = True) -> MemoryPlan:
    supply = Supply(limit * MIB, "the limit in /sys/fs/cgroup/memory.max", available * MIB)
    return replace(plan_of(budget * MIB, explicit=explicit), supply=supply)


def test_budget_above_the_limit_is_refused_with_limit_and_remedy() -> None:
    plan = supplied(401, limit=400, available=390)
    with pytest.raises(BudgetTooLargeError) as caught:
        plan.check_supply()
    text = str(caught.value)
    assert text.startswith(
        "--memory-budget gives 401 MiB, but the limit in /sys/fs/cgroup/memory.max is 400 MiB; "
    )
    assert "give 400MiB or less" in text
    (warning,) = plan.warnings()
    assert "the limit in /sys/fs/cgroup/memory.max is 400 MiB" in warning


def test_budget_above_what_is_available_is_a_warning() -> None:
    plan = supplied(400, limit=400, available=390)
    plan.check_supply()
    (warning,) = plan.warnings()
    assert "--memory-budget gives 400 MiB, but only 390 MiB are available now" in warning
    assert supplied(400, limit=400, available=400).warnings() == []
    detected = supplied(401, limit=400, available=390, explicit=False)
    detected.check_supply()
    assert detected.warnings() == []


def test_refusal_has_the_arithmetic_and_the_remedies() -> None:
    plan = plan_of(200 * MIB)
    with pytest.raises(BudgetTooSmallError) as caught:
        plan.check()
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("--memory-budget gives 200 MiB, but Mixed needs at least ")
    terms = re.findall(r"([0-9]+) MiB (front end|engine|dense weights|KV|compute|experts|reserve)", text)
    assert [name for _, name in terms] == [
        *("front end", "engine", "dense weights", "KV", "compute", "experts", "reserve")
    ]
    assert abs(sum(int(n) for n, _ in terms) - plan.floor_bytes / MIB) < 2
    assert "a smaller --ctx-size" in text
    assert "a smaller --batch-size" in text
    (remedy,) = re.findall(r"--memory-budget ([0-9]+)MiB or more", text)
    plan_of(int(remedy) * MIB).check()


def test_refusal_of_a_detected_budget_names_where_it_comes_from() -> None:
    with pytest.raises(BudgetTooSmallError) as caught:
        plan_of(200 * MIB, explicit=False).check()
    assert str(caught.value).startswith("the limit in /sys/fs/cgroup/memory.max gives 200 MiB, but")
    assert "raise the limit" in str(caught.value)


def test_budget_below_one_tokens_experts_is_served_with_a_warning() -> None:
    # 24 experts of one token take 56 MiB and one layer of each class 80 MiB: give this one a larger k
    layout = {**LAYOUT, "n_expert_used": 12}
    plan = plan_of(400 * MIB, layout=layout)
    assert plan.below_cliff
    (warning,) = plan.warnings()
    (remedy,) = re.findall(r"--memory-budget ([0-9]+)MiB", warning)
    variation = START_VARIATION_BYTES // MIB
    assert not plan_of((int(remedy) - variation) * MIB, layout=layout).below_cliff
    assert plan_of((int(remedy) - variation - 2) * MIB, layout=layout).below_cliff


def test_budget_above_the_cliff_has_no_warning() -> None:
    assert plan_of(400 * MIB).warnings() == []


@pytest.mark.parametrize(
    ("budget", "compute", "smaller"),
    [(400, 20, False), (400, 60, True), (10_000, 60, False), (200, 20, True)],
    ids=["small share", "large share", "all resident", "does not fit"],
)
def test_batches_shrink_where_their_buffers_cost_the_slots_much(
    budget: int, compute: int, smaller: bool
) -> None:
    plan = plan_of(budget * MIB).with_needs(compute_bytes=compute * MIB)
    assert plan.batch_is_too_large == smaller
    assert not plan.with_needs(n_batch=32).batch_is_too_large


def test_dense_model_has_a_plan_without_experts() -> None:
    plan = plan_of(400 * MIB, layout=DENSE)
    assert plan.fits
    assert plan.capacity_bytes == 0
    assert plan.warnings() == []
    assert any("no experts" in line for line in plan.lines())


def test_plan_in_words_names_every_pool() -> None:
    text = "\n".join(plan_of(400 * MIB).lines())
    for part in (
        "400 MiB (--memory-budget)",
        "processes 90 MiB",
        "weights 100 MiB",
        "KV 30 MiB (4096 tokens)",
    ):
        assert part in text
    assert "compute 20 MiB (batches of 512)" in text
    assert "of 96 experts fit" in text


def test_plan_on_the_wire_and_in_json_has_the_same_numbers() -> None:
    plan = plan_of(400 * MIB)
    sent = plan.to_wire({"io": "direct", "reader": "threads", "reason": "the kernel does not allow io_uring"})
    written = json.loads(json.dumps(plan.to_json()))
    assert {pool.pool: pool.budget_bytes for pool in sent.pools} == written["pools"] == plan.pools
    assert (sent.n_slots, sent.n_experts, sent.floor_bytes) == (
        *(written["slots"], written["experts"], written["floor_bytes"]),
    )
    assert sent.n_cycle_slots == written["cliff_slots"] == 24
    assert sent.lines[-1] == "experts are read with threads, direct I/O (the kernel does not allow io_uring)"


def test_speed_with_all_experts_resident_is_the_memorys_alone() -> None:
    machine = Machine(drive_bytes_per_second=1.0, memory_bytes_per_second=1000 * MIB)
    speed = expected_speed(plan_of(10_000 * MIB), machine)
    assert (speed.low_hit_rate, speed.high_hit_rate) == (1.0, 1.0)
    token_bytes = NEEDS.weights_bytes + CYCLE_BYTES
    assert speed.low == pytest.approx(0.4 * 1000 * MIB / token_bytes)
    assert speed.high == pytest.approx(0.9 * 1000 * MIB / token_bytes)


def test_speed_of_a_slow_drive_is_the_drives() -> None:
    plan = plan_of(400 * MIB)
    machine = Machine(drive_bytes_per_second=10 * MIB, memory_bytes_per_second=1e15)
    speed = expected_speed(plan, machine)
    share = plan.capacity_bytes / ALL_SLOTS_BYTES
    assert speed.low == pytest.approx(10 * MIB / ((1 - share) * CYCLE_BYTES), rel=1e-3)
    assert speed.high == pytest.approx(10 * MIB / ((1 - share) ** 2.5 * CYCLE_BYTES), rel=1e-3)


@given(st.integers(320, 480), st.integers(1, 100))
def test_more_memory_is_never_slower(budget: int, more: int) -> None:
    machine = Machine(1e9, 2e10)
    small, large = (expected_speed(plan_of(n * MIB), machine) for n in (budget, budget + more))
    assert small.low <= large.low
    assert small.high <= large.high
    assert small.low <= small.high


def test_hit_rates_of_the_high_bound_are_those_replayed_on_chat_text() -> None:
    for share, hit_rate in ((16 / 64, 0.56), (26 / 64, 0.74), (41 / 64, 0.91)):
        assert 1 - (1 - share) ** 2.5 == pytest.approx(hit_rate, abs=0.05)


def test_sizes_are_shown_rounded_but_floors_upwards() -> None:
    assert show(1500 * MIB) == "1500 MiB"
    assert show(1500 * MIB + 1) == "1500 MiB"
    assert show(1500 * MIB + 1, up=True) == "1501 MiB"
    assert show(MIB * 3 // 2) == "1.50 MiB"
    assert show(0) == "0 MiB"
    assert show_flag(1500 * MIB + 1) == "1501MiB"
