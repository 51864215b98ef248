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

WITHOUT_SLOTS = "give a smaller --ctx-size or --batch-size, or use --device cpu"
"""What helps a model that needs more memory than there is."""


class GpuMemoryError(Exception):
    """The model cannot be served from the GPU; the message says why and what to do."""


def free_budget(free_bytes: int, total_bytes: int) -> Budget:
    """What may be taken of a GPU of which free_bytes are free."""
    reserve = max(RESERVE_BYTES, total_bytes // RESERVE_DIVISOR)
    return Budget(max(0, free_bytes - reserve), "what the GPU has free")


def activation_bytes(n_batch: int, n_expert_used: int, n_ff_expert: int, n_embd: int) -> int:
    """What the experts of one layer hold between their matrices while n_batch tokens are computed: for each
    token and each of its experts the outputs of gate and up and their product, [n_ff_expert] each, and then
    the output of down, [n_embd] (some architectures keep the weighted input, as large, beside the first
    three instead), in F32. Never more than three and one of them are live at once; layers share them."""
    return n_batch * n_expert_used * (3 * n_ff_expert + n_embd) * 4


@dataclass(frozen=True)
class DenseNeeds:
    """What the model takes of a GPU beside its experts. Bytes."""

    weights_bytes: int
    """Those that are not experts."""
    kv_bytes: int
    compute_bytes: int
    """Buffers of intermediate results, those between the experts' matrices included."""

    @property
    def n_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes


@dataclass(frozen=True)
class GpuPlan:
    """How a GPU's memory is divided. Bytes."""

    name: str
    """Of the GPU, for people."""
    budget: Budget
    dense: DenseNeeds
    expert_bytes: int
    """All experts."""
    n_experts: int
    floor_bytes: int
    """The least capacity of slots, with those that hold zeros."""
    gpu_bytes: tuple[int, ...]
    """What may be taken of this GPU and of each other one: a model without slots is spread over them."""
    piece_bytes: int
    """The largest piece that is not divided among GPUs: a layer with its experts and its part of the KV
    cache, or the matrix of the output."""

    @property
    def fixed_bytes(self) -> int:
        """Weights that are not experts, KV cache, compute buffers."""
        return self.dense.n_bytes

    @property
    def left_bytes(self) -> int:
        """For experts; may be negative."""
        return self.budget.n_bytes - self.fixed_bytes

    @property
    def whole_bytes(self) -> int:
        """What the model takes of all GPUs without slots. Each has compute buffers, and as pieces are not
        divided, each but one may end with room for less than a piece. With equal GPUs that is exact: of T
        bytes in pieces of P, the fullest of n GPUs has at most T/n + P(n-1)/n."""
        more_bytes = (len(self.gpu_bytes) - 1) * (self.dense.compute_bytes + self.piece_bytes)
        return self.fixed_bytes + self.expert_bytes + more_bytes

    @property
    def holds_all(self) -> bool:
        """Whether all experts fit without slots."""
        return self.whole_bytes <= sum(self.gpu_bytes)

    @property
    def remedy(self) -> str:
        """For a model that has no room as a whole after all."""
        if not self.fits:
            return WITHOUT_SLOTS
        most = show_flag(self.budget.n_bytes, up=False)
        return f"give --vram-budget {most} or less, so that experts come from slots; or {WITHOUT_SLOTS}"

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
            f"{more}, or {WITHOUT_SLOTS}"
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
