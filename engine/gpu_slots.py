"""Slots for experts on a GPU: whether they are wanted, what they may take, and what they cannot be combined
with."""

from __future__ import annotations

import logging
from typing import Any, Final

from s2moe.engine.device import Device
from s2moe.engine.errors import EngineStartError
from s2moe.engine.gpu_plan import DenseNeeds, GpuMemoryError, GpuPlan, free_budget
from s2moe.engine.memory import Budget
from s2moe.engine.messages import Configure
from s2moe.engine.native import Library, NativeError
from s2moe.engine.native_experts import Experts, gpu_memory
from s2moe.engine.plan import ModelLayout, show

logger = logging.getLogger(__name__)

NO_DRAFT_CONTEXT: Final = (
    "invalid_setting",
    "drafts on a KV cache of their own are not possible with slots for experts on a GPU; choose another "
    "--speculation, omit --no-shared-context, or use --device cpu",
)
NO_CACHE: Final = (
    "a model without experts, or one for embeddings, lies on the GPU as a whole, without an expert cache "
    "and a memory plan"
)

_CACHE_FLAGS: Final = (
    *("--vram-budget", "--memory-budget", "--io", "--reader"),
    *("--hot-experts", "--expert-policy", "--expert-trace"),
)


def plan_gpu(
    library: Library,
    device: Device,
    configure: Configure,
    layout: ModelLayout,
    machine_budget: Budget,
    *,
    dense: DenseNeeds,
    output_bytes: int,
    floor_bytes: int,
) -> GpuPlan:
    """For the first GPU. `machine_budget` counts where that shares the machine's memory. `output_bytes`: at
    most, of the matrix that gives the logits; `floor_bytes`: what slots need at least.

    Raises EngineStartError.
    """
    gpu = device.gpus[0]
    chosen = configure.vram_budget_bytes
    if chosen > gpu.total_bytes:
        raise EngineStartError(
            "budget_too_large",
            f"--vram-budget gives {show(chosen, up=True)}, but {gpu.describe()} has {show(gpu.total_bytes)}; "
            "omit it to take what is free",
        )
    try:
        budgets = [free_budget(*gpu_memory(library, i)) for i in range(len(device.gpus))]
    except NativeError as error:
        raise EngineStartError(
            "device_unavailable",
            f"--device cuda: {error.message}; run nvidia-smi to see whether it works, or use --device cpu",
        ) from error
    if device.is_unified:
        # what the driver calls free is without the page cache, which gives way
        budgets = [machine_budget]
    budget = budgets[0]
    if chosen > budget.n_bytes and not device.is_unified:
        raise EngineStartError(
            "insufficient_memory",
            f"--vram-budget gives {show(chosen, up=True)}, but {gpu.describe()} has only "
            f"{show(budget.n_bytes)} free beside a reserve; free more of it, or give less",
        )
    if chosen:
        budget = Budget(chosen, "--vram-budget", explicit=True)
    return GpuPlan(
        name=gpu.name,
        budget=budget,
        dense=dense,
        expert_bytes=layout.expert_bytes,
        n_experts=layout.n_experts_total,
        floor_bytes=floor_bytes,
        gpu_bytes=tuple(each.n_bytes for each in budgets),
        piece_bytes=max(_layer_bytes(layout, dense), min(output_bytes, dense.weights_bytes)),
    )


def _layer_bytes(layout: ModelLayout, dense: DenseNeeds) -> int:
    """Of the largest layer, with its part of the KV cache."""
    experts_bytes = max(each.n_floor_slots * each.slot_bytes for each in layout.classes)
    return experts_bytes + (dense.weights_bytes + dense.kv_bytes) // layout.n_layer


def may_lie_whole(configure: Configure, plan: GpuPlan) -> bool:
    """Whether there is room for all experts and nothing asks for slots."""
    return plan.holds_all and not _given(configure, _CACHE_FLAGS)


def wants_slots(configure: Configure, plan: GpuPlan) -> bool:
    """Whether experts come from slots, instead of all lying on the GPU. Raises EngineStartError where they
    must and cannot."""
    if may_lie_whole(configure, plan):
        return False
    _refuse(configure, ("--expert-policy", "--expert-trace"), "with slots for experts on a GPU")
    try:
        plan.check()
    except GpuMemoryError as error:
        code = "budget_too_small" if plan.budget.explicit else "insufficient_memory"
        raise EngineStartError(code, str(error)) from None
    return True


def allocate_slots(
    plan: GpuPlan, device: Device, experts: Experts, context: Any, capacity_bytes: int
) -> None:
    """Those of the expert cache, whose share of the memory plan is capacity_bytes, and those of the GPU.

    Raises EngineStartError, and NativeError for the cache's.
    """
    slots_bytes = plan.capacity_bytes
    if device.is_unified:
        # what has a slot of the GPU is in the machine's memory already: the cache only feeds it
        slots_bytes, capacity_bytes = min(slots_bytes, capacity_bytes), experts.floor_bytes
    experts.allocate(max(capacity_bytes, experts.floor_bytes))
    try:
        experts.use_device(context, device.slots_name, max(slots_bytes, experts.device_floor_bytes))
    except NativeError as error:
        raise EngineStartError(
            "insufficient_memory",
            f"no slots for experts on {plan.name}: {error.message}; give a smaller --vram-budget",
        ) from error
    made = experts.device
    if made is not None and not made["pinned"]:
        logger.warning(
            "%s cannot read the expert cache where it is (%s): each expert is copied once more on its way",
            *(plan.name, made["reason"]),
        )
    if made is not None and made["watchdog"]:
        logger.warning(
            "the driver ends what runs on %s for some seconds, since a display hangs on it: with a slow "
            "drive the engine may end in the midst of a long prompt; use another GPU for the display",
            plan.name,
        )


def refuse_cache_options(configure: Configure) -> None:
    """Raises EngineStartError for what only an expert cache could do."""
    _refuse(configure, _CACHE_FLAGS, f"with --device cuda here: {NO_CACHE}")


def _given(configure: Configure, flags: tuple[str, ...]) -> list[str]:
    given = {
        "--vram-budget": configure.vram_budget_bytes != 0,
        "--memory-budget": configure.memory_budget_bytes != 0,
        "--io": configure.io != "auto",
        "--reader": configure.reader != "auto",
        "--hot-experts": configure.hot_experts_path is not None,
        "--expert-policy": configure.expert_policy != "cache",
        "--expert-trace": configure.expert_trace_path is not None,
    }
    return [flag for flag in flags if given[flag]]


def _refuse(configure: Configure, flags: tuple[str, ...], where: str) -> None:
    for flag in _given(configure, flags):
        raise EngineStartError(
            "invalid_setting", f"{flag} is not possible {where}; omit it, or use --device cpu"
        )
