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

AUTO_PROMPT_CACHE = -1
"""As the size of the prompt cache: see MemoryPlan.prompt_cache_bytes."""
MAX_AUTO_PROMPT_CACHE_BYTES = 1024 * MIB
AUTO_PROMPT_CACHE_DIVISOR = 10
AUTO_PROMPT_CACHE_CONTEXTS = 2
"""Conversations of full length that an automatic prompt cache holds at most."""


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

    def without_experts(self) -> ModelLayout:
        """As a dense model of the same size: for one whose experts are weights like others."""
        return replace(
            self,
            n_expert=0,
            n_expert_used=0,
            dense_bytes=self.dense_bytes + self.expert_bytes,
            expert_bytes=0,
            classes=(),
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
    gpu_kv_bytes: int = 0
    """Of the KV cache, what lies in the memory of a GPU and not in the budget."""

    @property
    def kv_text(self) -> str:
        caches = "KV cache" if self.n_kv_caches == 1 else f"{self.n_kv_caches} KV caches"
        return f"{caches} of {self.n_ctx} tokens"


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
    feed_bytes: int = 0
    """Of an expert cache that feeds slots of a GPU in the same memory; the plan's slots are then those."""
    prompt_cache_size: int = 0
    """Bytes for KV rows of other conversations as asked for, or AUTO_PROMPT_CACHE."""

    @property
    def reserve_bytes(self) -> int:
        mapped = min(self.budget.n_bytes, self.fixed_bytes + self.layout.all_slots_bytes)
        return RESERVE_BYTES + _round_up(mapped, RESERVE_DIVISOR)

    @property
    def processes_bytes(self) -> int:
        return self.needs.front_end_bytes + self.needs.engine_bytes

    @property
    def fixed_bytes(self) -> int:
        """Everything but slots, the reserve and a prompt cache that takes what there is."""
        return self._fixed_bytes(self.needs.compute_bytes)

    @property
    def prompt_cache_bytes(self) -> int:
        """What was asked for; else a tenth of what is left beyond the floor and the experts of one token, at
        most two whole contexts and 1 GiB, and nothing that all experts need where they fit."""
        if self.prompt_cache_size != AUTO_PROMPT_CACHE:
            return self.prompt_cache_size
        left_bytes = self._left_without_auto_bytes
        all_bytes = self.layout.all_slots_bytes
        least_bytes = max(self.slots_floor_bytes, min(self.layout.cycle_bytes, all_bytes))
        spare_bytes = max(0, left_bytes - (all_bytes if left_bytes >= all_bytes else least_bytes))
        return min(
            MAX_AUTO_PROMPT_CACHE_BYTES,
            AUTO_PROMPT_CACHE_CONTEXTS * (self.needs.kv_bytes + self.needs.gpu_kv_bytes),
            max(0, left_bytes - least_bytes) // AUTO_PROMPT_CACHE_DIVISOR,
            spare_bytes - _round_up(spare_bytes, RESERVE_DIVISOR),  # page tables of its own
        )

    @property
    def left_bytes(self) -> int:
        """For slots; negative when not even the rest fits."""
        if self.prompt_cache_size == AUTO_PROMPT_CACHE:
            return self._left_without_auto_bytes - self.prompt_cache_bytes
        return self._left_without_auto_bytes

    @property
    def _left_without_auto_bytes(self) -> int:
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
        asked_bytes = max(0, self.prompt_cache_size)
        return (
            self.processes_bytes
            + self.needs.weights_bytes
            + self.needs.kv_bytes
            + compute_bytes
            + self.feed_bytes
            + asked_bytes
        )

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
        operator wants a budget kept or memory set aside."""
        return self.layout.n_expert > 0 or self.budget.explicit or self.prompt_cache_size > 0

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
            "expert_cache": self.capacity_bytes + self.feed_bytes,
            "prompt_cache": self.prompt_cache_bytes,
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
            (max(0, self.prompt_cache_size), "prompt cache"),
            (self.slots_floor_bytes + self.feed_bytes, "experts of one layer"),
            (self.floor_bytes - self.fixed_bytes - self.slots_floor_bytes, "reserve"),
        ]
        return " + ".join(f"{show(n_bytes)} {name}" for n_bytes, name in terms if n_bytes)

    def _remedies(self) -> str:
        if self.budget.explicit:
            remedies = [f"give --memory-budget {show_flag(self.floor_bytes)} or more"]
        else:
            remedies = ["free memory or raise the limit"]
        if self.prompt_cache_size > 0:
            remedies.append("a smaller --prompt-cache-size")
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
            f"(batches of {needs.n_batch}), prompt cache {show(self.prompt_cache_bytes)}, "
            f"reserve {show(self.reserve_bytes)}"
        ]
        if not layout.n_expert:
            return [*lines, "a model that has no experts to read on demand: all of it stays in memory"]
        share = f"{100 * self.resident_share:.0f} %" if not self.all_resident else "all"
        lines.append(
            f"expert cache {show(self.capacity_bytes)}: {self.n_slots} of {layout.n_experts_total} experts "
            f"fit ({share}); one token uses {layout.cycle_slots}; least possible budget "
            f"{show(self.floor_bytes, up=True)}, all experts from {show(self.full_bytes, up=True)} on"
        )
        return lines

    def to_wire(self, reader: Mapping[str, Any], gpu_line: str = "") -> Plan:
        """`reader`: how experts are read, as Experts.reader() says; empty for a dense model. `gpu_line`: what
        GpuPlan.line() says; empty: no slots on a GPU."""
        lines = [*self.lines(), *filter(None, [gpu_line])]
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
