"""The memory plan: what a budget pays for, and what is left for experts. Pure arithmetic; docs/memory-plan.md
explains it to users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from s2moe.engine.memory import MIB, Budget, Supply
from s2moe.engine.messages import MemoryPool, Plan

MIN_BATCH_TOKENS = 32
"""Below that many prompt tokens per micro-batch nothing worth having is saved."""
COMPUTE_DIVISOR = 4
"""Compute buffers may take a fourth of what the slots take before a smaller micro-batch pays: a long prompt
then reads every expert once more, but each generated token reads fewer."""
RESERVE_BYTES = 16 * MIB
RESERVE_DIVISOR = 256
"""What both processes may still grow by while they serve (text, JSON, the sampler's candidates), and a part
of all memory, twice what its page tables take."""
START_VARIATION_BYTES = 4 * MIB
"""By so much the processes of two starts may differ. Advice has it on top, so that it can be followed, and
what is measured after the load may exceed what was planned by it, at the cost of the reserve."""

ROUTING_SKEW = 2.5
MEMORY_SHARES = (0.4, 0.9)
"""See expected_speed()."""


class BudgetTooSmallError(Exception):
    """The model cannot be served within the budget; the message has the arithmetic and the remedies."""


class BudgetTooLargeError(Exception):
    """There is not that much memory; the message names the limit and the remedy."""


@dataclass(frozen=True)
class SlotClass:
    """Layers whose experts are equally large, and which therefore share slots."""

    slot_bytes: int
    n_layers: int
    n_experts: int
    """Of all its layers together."""

    @property
    def n_floor_slots(self) -> int:
        """Experts of one layer: a prompt may need them all at once."""
        return _round_up(self.n_experts, self.n_layers)


@dataclass(frozen=True)
class ModelLayout:
    """What the headers of a model file say of its sizes."""

    architecture: str
    name: str
    n_layer: int
    n_ctx_train: int
    n_expert: int
    """Experts per layer; 0 for a dense model."""
    n_expert_used: int
    file_bytes: int
    dense_bytes: int
    expert_bytes: int
    """Of all experts, as stored in the file."""
    classes: tuple[SlotClass, ...]
    tensor_types: Mapping[str, int]
    """Bytes by the name of the type."""
    files: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, layout: Mapping[str, Any]) -> ModelLayout:
        """From the object of s2moe_model_layout()."""
        classes = tuple(
            SlotClass(each["slot_bytes"], each["n_layers"], each["n_experts"]) for each in layout["classes"]
        )
        return cls(
            architecture=layout["architecture"],
            name=layout["name"],
            n_layer=layout["n_layer"],
            n_ctx_train=layout["n_ctx_train"],
            n_expert=layout["n_expert"] if classes else 0,
            n_expert_used=layout["n_expert_used"] if classes else 0,
            file_bytes=layout["file_bytes"],
            dense_bytes=layout["dense_bytes"],
            expert_bytes=layout["expert_bytes"],
            classes=classes,
            tensor_types=layout["tensor_types"],
            files=tuple(file["path"] for file in layout["files"]),
        )

    @property
    def n_moe_layer(self) -> int:
        return sum(each.n_layers for each in self.classes)

    @property
    def n_experts_total(self) -> int:
        return sum(each.n_experts for each in self.classes)

    @property
    def all_slots_bytes(self) -> int:
        """Slots for every expert."""
        return sum(each.n_experts * each.slot_bytes for each in self.classes)

    @property
    def cycle_slots(self) -> int:
        """Experts that one token uses."""
        return self.n_moe_layer * self.n_expert_used

    @property
    def cycle_bytes(self) -> int:
        return sum(each.n_layers * self.n_expert_used * each.slot_bytes for each in self.classes)

    @property
    def floor_slots_bytes(self) -> int:
        """Slots for one layer of every class."""
        return sum(each.n_floor_slots * each.slot_bytes for each in self.classes)


@dataclass(frozen=True)
class Needs:
    """What must fit beside the experts, in bytes."""

    front_end_bytes: int
    engine_bytes: int
    """The process without the three below."""
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    n_ctx: int
    n_batch: int
    n_kv_caches: int = 1
    """2: drafts have one of their own."""

    @property
    def kv_text(self) -> str:
        caches = "KV cache" if self.n_kv_caches == 1 else f"{self.n_kv_caches} KV caches"
        return f"{caches} of {self.n_ctx} tokens"


@dataclass(frozen=True)
class Machine:
    """What a short measurement found."""

    drive_bytes_per_second: float
    memory_bytes_per_second: float
    """Read by as many threads as will compute."""


@dataclass(frozen=True)
class MemoryPlan:
    """How a budget is divided."""

    layout: ModelLayout
    budget: Budget
    needs: Needs
    slots_floor_bytes: int
    batches: Mapping[int, int] = field(default_factory=dict)
    """Bytes of the compute buffers for each micro-batch that with_best_batch() may choose; empty: the
    operator chose one."""
    supply: Supply | None = None
    """None: not known."""

    @property
    def reserve_bytes(self) -> int:
        mapped = min(self.budget.n_bytes, self.fixed_bytes + self.layout.all_slots_bytes)
        return RESERVE_BYTES + _round_up(mapped, RESERVE_DIVISOR)

    @property
    def processes_bytes(self) -> int:
        return self.needs.front_end_bytes + self.needs.engine_bytes

    @property
    def fixed_bytes(self) -> int:
        """Everything but slots and the reserve."""
        return self._fixed_bytes(self.needs.compute_bytes)

    @property
    def left_bytes(self) -> int:
        """For slots; negative when not even the rest fits."""
        return self.budget.n_bytes - self.fixed_bytes - self.reserve_bytes

    @property
    def least_bytes(self) -> int:
        """The least budget that is accepted, to the byte, with the processes as they are now."""
        return self._budget_for(self.slots_floor_bytes, min(self._compute_sizes))

    @property
    def floor_bytes(self) -> int:
        """The least budget that every start accepts."""
        return self.least_bytes + START_VARIATION_BYTES

    @property
    def full_bytes(self) -> int:
        """The budget from which on every expert has a slot at every start, with the largest micro-batch."""
        return self._budget_for(self.layout.all_slots_bytes, max(self._compute_sizes)) + START_VARIATION_BYTES

    @property
    def cliff_bytes(self) -> int:
        """The budget from which on the experts of one token fit at every start.

        A larger budget may also choose a larger micro-batch. While they do not fit it only does so where
        the buffers take less than COMPUTE_DIVISOR allows, so that larger batches need not be paid for.
        """
        slots_bytes = min(self.layout.cycle_bytes, self.layout.all_slots_bytes)
        sizes = self._compute_sizes
        chosen = [size for size in sizes if size * COMPUTE_DIVISOR < slots_bytes]
        return self._budget_for(slots_bytes, max(chosen, default=min(sizes))) + START_VARIATION_BYTES

    @property
    def _compute_sizes(self) -> tuple[int, ...]:
        """Bytes of the compute buffers, by what another budget would choose."""
        return tuple(self.batches.values()) or (self.needs.compute_bytes,)

    def _fixed_bytes(self, compute_bytes: int) -> int:
        return self.processes_bytes + self.needs.weights_bytes + self.needs.kv_bytes + compute_bytes

    def _budget_for(self, slots_bytes: int, compute_bytes: int) -> int:
        """The least budget that leaves as much to the slots."""
        fixed_bytes = self._fixed_bytes(compute_bytes)
        needed = fixed_bytes + RESERVE_BYTES + slots_bytes
        mapped = fixed_bytes + self.layout.all_slots_bytes
        full = mapped + RESERVE_BYTES + _round_up(mapped, RESERVE_DIVISOR)
        return min(_round_up(needed * RESERVE_DIVISOR, RESERVE_DIVISOR - 1), full)

    @property
    def fits(self) -> bool:
        return self.left_bytes >= self.slots_floor_bytes

    @property
    def must_fit(self) -> bool:
        """Weights of a dense model are mapped from the file: too many of them are slow, but work, unless the
        operator wants a budget kept."""
        return self.layout.n_expert > 0 or self.budget.explicit

    @property
    def capacity_bytes(self) -> int:
        """What the slots may take: all that is left, but no more than every expert needs."""
        return max(0, min(self.left_bytes, self.layout.all_slots_bytes))

    @property
    def resident_share(self) -> float:
        """Experts that fit into the slots, 0 … 1."""
        return self.capacity_bytes / self.layout.all_slots_bytes if self.layout.all_slots_bytes else 1.0

    @property
    def n_slots(self) -> int:
        """Experts that fit; exact where all are equally large."""
        return int(self.layout.n_experts_total * self.resident_share)

    @property
    def all_resident(self) -> bool:
        return self.capacity_bytes >= self.layout.all_slots_bytes

    @property
    def below_cliff(self) -> bool:
        """Whether one token uses more experts than there are slots."""
        return self.capacity_bytes < min(self.layout.cycle_bytes, self.layout.all_slots_bytes)

    @property
    def batch_is_too_large(self) -> bool:
        """Whether a smaller micro-batch would leave the slots a share of memory that they lack."""
        if self.needs.n_batch <= MIN_BATCH_TOKENS:
            return False
        if not self.fits:
            return True
        return not self.all_resident and self.needs.compute_bytes * COMPUTE_DIVISOR > self.capacity_bytes

    @property
    def pools(self) -> dict[str, int]:
        """Bytes by pool; the pools are the metrics' and add up to what is used of the budget."""
        return {
            "processes": self.processes_bytes,
            "weights": self.needs.weights_bytes,
            "kv": self.needs.kv_bytes,
            "compute": self.needs.compute_bytes,
            "expert_cache": self.capacity_bytes,
            "reserve": self.reserve_bytes,
        }

    def with_needs(self, **changes: int) -> MemoryPlan:
        """The plan for other needs: fields of Needs."""
        return replace(self, needs=replace(self.needs, **changes))

    def with_best_batch(self) -> MemoryPlan:
        """The plan with the largest micro-batch of `batches` that is not too large."""
        plan = self
        for n_batch in sorted(self.batches, reverse=True):
            plan = self.with_needs(n_batch=n_batch, compute_bytes=self.batches[n_batch])
            if not plan.batch_is_too_large:
                break
        return plan

    def check_supply(self) -> None:
        """Raises BudgetTooLargeError when the operator's budget is more than there can ever be."""
        if self._exceeds_limit and self.supply is not None:
            raise BudgetTooLargeError(
                f"{self._excess_text(self.supply)}; omit --memory-budget to take what there is, or give "
                f"{show_flag(self.supply.limit_bytes, up=False)} or less"
            )

    @property
    def _exceeds_limit(self) -> bool:
        supply = self.supply
        return supply is not None and self.budget.explicit and self.budget.n_bytes > supply.limit_bytes

    def _excess_text(self, supply: Supply) -> str:
        return (
            f"--memory-budget gives {show(self.budget.n_bytes, up=True)}, but {supply.limit_source} is "
            f"{supply.limit_bytes // MIB} MiB"
        )

    def check(self, tolerance_bytes: int = 0) -> None:
        """Raises BudgetTooSmallError when the budget is below the floor, by more than the tolerance."""
        if self.left_bytes + tolerance_bytes >= self.slots_floor_bytes:
            return
        what = "--memory-budget" if self.budget.explicit else self.budget.source
        raise BudgetTooSmallError(
            f"{what} gives {show(self.budget.n_bytes)}, but {self.layout.name or 'the model'} needs at least "
            f"{show(self.floor_bytes, up=True)}: {self._sum_text()}; {self._remedies()}"
        )

    def _sum_text(self) -> str:
        needs = self.needs
        terms = [
            (needs.front_end_bytes, "front end"),
            (needs.engine_bytes, "engine"),
            (needs.weights_bytes, "dense weights" if self.layout.n_expert else "weights"),
            (needs.kv_bytes, needs.kv_text),
            (needs.compute_bytes, f"compute buffers for {needs.n_batch} tokens"),
            (self.slots_floor_bytes, "experts of one layer"),
            (self.floor_bytes - self.fixed_bytes - self.slots_floor_bytes, "reserve"),
        ]
        return " + ".join(f"{show(n_bytes)} {name}" for n_bytes, name in terms if n_bytes)

    def _remedies(self) -> str:
        if self.budget.explicit:
            remedies = [f"give --memory-budget {show_flag(self.floor_bytes)} or more"]
        else:
            remedies = ["free memory or raise the limit"]
        if self.needs.n_kv_caches > 1:
            remedies.append("a --speculation that drafts on the shared context")
        if self.needs.n_ctx > 512:
            remedies.append("a smaller --ctx-size")
        if self.needs.n_batch > MIN_BATCH_TOKENS:
            remedies.append("a smaller --batch-size")
        return ", or ".join(remedies) + ", or take a model with fewer or smaller weights"

    def warnings(self) -> list[str]:
        """What the operator should know, one line each."""
        warnings = []
        supply = self.supply
        if supply is not None and self._exceeds_limit:
            warnings.append(f"{self._excess_text(supply)}: `s2moe serve` refuses that on this machine")
        elif supply is not None and self.budget.explicit and self.budget.n_bytes > supply.available_bytes:
            warnings.append(
                f"--memory-budget gives {show(self.budget.n_bytes)}, but only {show(supply.available_bytes)} "
                "are available now: the kernel may kill the engine; free memory or give a smaller budget"
            )
        if self.below_cliff and self.left_bytes + START_VARIATION_BYTES >= self.slots_floor_bytes:
            warnings.append(
                f"one token uses {self.layout.cycle_slots} experts but only {self.n_slots} fit, so that most "
                "are read again for each token; "
                f"from --memory-budget {show_flag(self.cliff_bytes)} on they fit"
            )
        return warnings

    def lines(self) -> list[str]:
        """The plan in a few lines for people."""
        needs, layout = self.needs, self.layout
        lines = [
            f"memory budget {show(self.budget.n_bytes)} ({self.budget.source}): "
            f"processes {show(self.processes_bytes)}, weights {show(needs.weights_bytes)}, "
            f"KV {show(needs.kv_bytes)} ({needs.n_ctx} tokens), compute {show(needs.compute_bytes)} "
            f"(batches of {needs.n_batch}), reserve {show(self.reserve_bytes)}"
        ]
        if not layout.n_expert:
            return [*lines, "a dense model: it has no experts, so all of it stays in memory"]
        share = f"{100 * self.resident_share:.0f} %" if not self.all_resident else "all"
        lines.append(
            f"expert cache {show(self.capacity_bytes)}: {self.n_slots} of {layout.n_experts_total} experts "
            f"fit ({share}); one token uses {layout.cycle_slots}; least possible budget "
            f"{show(self.floor_bytes, up=True)}, all experts from {show(self.full_bytes, up=True)} on"
        )
        return lines

    def to_wire(self, reader: Mapping[str, Any]) -> Plan:
        """`reader`: how experts are read, as Experts.reader() says; empty for a dense model."""
        lines = self.lines()
        if reader:
            why = f" ({reader['reason']})" if reader["reason"] else ""
            lines.append(f"experts are read with {reader['reader']}, {reader['io']} I/O{why}")
        return Plan(
            budget_bytes=self.budget.n_bytes,
            budget_source=self.budget.source,
            pools=[MemoryPool(pool=pool, budget_bytes=n_bytes) for pool, n_bytes in self.pools.items()],
            n_slots=self.n_slots,
            n_experts=self.layout.n_experts_total,
            floor_bytes=self.floor_bytes,
            n_cycle_slots=self.layout.cycle_slots,
            lines=lines,
            warnings=self.warnings(),
        )

    def to_json(self) -> dict[str, Any]:
        """For `s2moe inspect --json`; bytes, but for what names another unit."""
        return {
            "budget_bytes": self.budget.n_bytes,
            "budget_source": self.budget.source,
            "n_ctx": self.needs.n_ctx,
            "n_batch": self.needs.n_batch,
            "pools": self.pools,
            "fits": self.fits,
            "floor_bytes": self.floor_bytes,
            "full_bytes": self.full_bytes,
            "slots": self.n_slots,
            "experts": self.layout.n_experts_total,
            "resident_share": round(self.resident_share, 4),
            "cliff_slots": self.layout.cycle_slots,
            "below_cliff": self.below_cliff,
            "warnings": self.warnings(),
        }


@dataclass(frozen=True)
class Speed:
    """An estimate of decode speed in tokens per second, and the hit rates that it assumes."""

    low: float
    high: float
    low_hit_rate: float
    high_hit_rate: float


def expected_speed(plan: MemoryPlan, machine: Machine) -> Speed:
    """Bounds between which decoding one token at a time should lie; speculation and prompts are not in it.

        seconds = (dense bytes + bytes of one token's experts) / memory bandwidth
                  + (1 − hit rate) · bytes of one token's experts / drive bandwidth

    The low bound takes hit rate = s, the share of experts that fit, as if the router used all equally
    often; no overlap of reading and computing; and kernels that use 40 % of the measured memory bandwidth.
    The high bound takes hit rate = 1 − (1 − s)^2.5, which fits an LRU replayed on the routing of chat text
    (25 % of the experts: 56 %, 41 %: 74 %, 64 %: 91 %); reading and computing at the same time, so that the
    longer of the two counts; and 90 % of the memory bandwidth.
    """
    layout = plan.layout
    share = plan.resident_share
    hit_rates = (share, 1 - (1 - share) ** ROUTING_SKEW)
    token_bytes = plan.needs.weights_bytes + layout.cycle_bytes
    compute_seconds = [token_bytes / (part * machine.memory_bytes_per_second) for part in MEMORY_SHARES]
    read_seconds = [
        (1 - hit_rate) * layout.cycle_bytes / machine.drive_bytes_per_second if layout.cycle_bytes else 0.0
        for hit_rate in hit_rates
    ]
    return Speed(
        low=1 / (compute_seconds[0] + read_seconds[0]),
        high=1 / max(compute_seconds[1], read_seconds[1]),
        low_hit_rate=hit_rates[0],
        high_hit_rate=hit_rates[1],
    )


def show(n_bytes: int, *, up: bool = False) -> str:
    """In MiB, `1500 MiB`, small values with two decimals; `up`: never less than the exact value."""
    if n_bytes and n_bytes < 10 * MIB:
        return f"{n_bytes / MIB:.2f} MiB"
    return f"{_round_up(n_bytes, MIB) if up else round(n_bytes / MIB)} MiB"


def show_flag(n_bytes: int, *, up: bool = True) -> str:
    """As the flag takes it, rounded up or down."""
    return f"{_round_up(n_bytes, MIB) if up else n_bytes // MIB}MiB"


def _round_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
