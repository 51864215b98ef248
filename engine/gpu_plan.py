"""What a GPU's memory pays for: all of the model, or all but its experts and slots for these. Pure
arithmetic; docs/cuda.md explains it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from s2moe.engine.memory import MIB, Budget
from s2moe.engine.plan import show, show_flag

RESERVE_BYTES = 256 * MIB
"""Left to the driver and to who else draws on the GPU."""
RESERVE_DIVISOR = 20
"""So many of the memory's parts stay free, if that is more."""


class GpuMemoryError(Exception):
    """The model cannot be served from the GPU; the message says why and what to do."""


def free_budget(free_bytes: int, total_bytes: int) -> Budget:
    """What may be taken of a GPU of which free_bytes are free."""
    reserve = max(RESERVE_BYTES, total_bytes // RESERVE_DIVISOR)
    return Budget(max(0, free_bytes - reserve), "what the GPU has free")


@dataclass(frozen=True)
class GpuPlan:
    """How a GPU's memory is divided. Bytes."""

    name: str
    """Of the GPU, for people."""
    budget: Budget
    fixed_bytes: int
    """Weights that are not experts, KV cache, compute buffers."""
    expert_bytes: int
    """All experts."""
    n_experts: int
    floor_bytes: int
    """The least capacity of slots, with those that hold zeros."""
    all_gpus_bytes: int
    """What may be taken of this GPU and all others, over which a model without slots is spread."""

    @property
    def left_bytes(self) -> int:
        """For experts; may be negative."""
        return self.budget.n_bytes - self.fixed_bytes

    @property
    def holds_all(self) -> bool:
        """Whether all experts fit without slots."""
        return self.fixed_bytes + self.expert_bytes <= self.all_gpus_bytes

    @property
    def capacity_bytes(self) -> int:
        """For slots: all that is left; of which no more are made than there are experts."""
        return max(0, self.left_bytes)

    @property
    def fits(self) -> bool:
        return self.left_bytes >= self.floor_bytes

    @property
    def n_slots(self) -> int:
        """Experts that fit; about, where layers have experts of different sizes."""
        if not self.expert_bytes:
            return 0
        return min(self.n_experts, self.n_experts * self.capacity_bytes // self.expert_bytes)

    def check(self) -> None:
        """Raises GpuMemoryError when the slots would have less than their floor."""
        if self.fits:
            return
        needed = self.fixed_bytes + self.floor_bytes
        what = self.budget.source
        more = f"give {what} {show_flag(needed)} or more" if self.budget.explicit else "free some of it"
        raise GpuMemoryError(
            f"{what} gives {show(self.budget.n_bytes)} of {self.name}, but at least "
            f"{show(needed, up=True)} are needed: {show(self.fixed_bytes)} for the model without its "
            f"experts, its KV cache and its buffers + {show(self.floor_bytes)} for the experts of one layer; "
            f"{more}, or a smaller --ctx-size or --batch-size, or use --device cpu"
        )

    def limited_to(self, slots_bytes: int) -> GpuPlan:
        """The plan where the memory plan, which counts the same memory, leaves less to slots."""
        n_bytes = min(self.budget.n_bytes, self.fixed_bytes + slots_bytes)
        return replace(self, budget=replace(self.budget, n_bytes=n_bytes))

    def line(self) -> str:
        """The plan for people."""
        share = "all" if self.n_slots == self.n_experts else f"{100 * self.n_slots / self.n_experts:.0f} %"
        return (
            f"{self.name}: {show(self.budget.n_bytes)} ({self.budget.source}): model without experts, KV and "
            f"buffers {show(self.fixed_bytes)}, slots "
            f"{show(min(self.capacity_bytes, self.expert_bytes))} for {self.n_slots} of "
            f"{self.n_experts} experts ({share}); the expert cache in the machine's memory feeds them"
        )
