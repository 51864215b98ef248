"""`s2moe inspect`: what a model is, what a memory budget would do for it, and how fast that should be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s2moe.engine.cpu import default_thread_count
from s2moe.engine.errors import EngineStartError
from s2moe.engine.expected_speed import Machine, Speed, expected_speed
from s2moe.engine.loading import Loader
from s2moe.engine.memory import MIB, Footprint, resident_bytes
from s2moe.engine.memory_speed import measure_memory_speed
from s2moe.engine.messages import Configure
from s2moe.engine.model_file import about, check_file
from s2moe.engine.native import Library, LibraryNotFoundError, NativeError, load_llama_cpp
from s2moe.engine.native_log import NativeLog
from s2moe.engine.plan import BudgetTooSmallError, MemoryPlan, show

FRONT_END_BYTES = 58 * MIB
ENGINE_BASE_BYTES = 24 * MIB
"""Resident sets as measured: of the front end, and of an engine without libraries and model. `serve` measures
its own instead."""
MEASURED_BYTES = 256 * MIB
"""Read from the drive for its speed; less of a model that has less."""


class InspectError(Exception):
    """The model cannot be inspected; the message is one line with the remedy."""


@dataclass(frozen=True)
class Inspection:
    """What was found."""

    path: Path
    plan: MemoryPlan
    expert_file_bytes: tuple[int, int]
    """Of one expert in the file: the smallest and the largest; zeros for a dense model."""
    reader: dict[str, Any] | None
    """How experts would be read, as s2moe_experts_reader() says; None for a dense model."""
    machine: Machine
    n_threads: int

    @property
    def speed(self) -> Speed | None:
        """None where the budget is too small to serve at all."""
        return expected_speed(self.plan, self.machine) if self.plan.fits else None

    @property
    def refusal(self) -> str:
        """Why `serve` would refuse the budget as too small; "" when it would not."""
        try:
            if self.plan.must_fit:
                self.plan.check()
        except BudgetTooSmallError as error:
            return str(error)
        return ""

    def lines(self) -> Iterator[str]:
        """For people."""
        plan, layout = self.plan, self.plan.layout
        yield _row("model", f"{layout.name or self.path.stem}, in {self.path.name}")
        yield _row("architecture", layout.architecture)
        types = sorted(layout.tensor_types.items(), key=lambda item: -item[1])
        yield _row("file", f"{show(layout.file_bytes)}: " + ", ".join(f"{show(n)} {t}" for t, n in types))
        if layout.n_expert:
            yield _row(
                "experts",
                f"{layout.n_expert} per layer, {layout.n_expert_used} per token, in {layout.n_moe_layer} of "
                f"{layout.n_layer} layers; {_range_text(self.expert_file_bytes)} each, "
                f"{show(layout.expert_bytes)} in all",
            )
        else:
            yield _row("experts", f"none: a dense model of {layout.n_layer} layers")
        needs = plan.needs
        yield _row("dense weights" if layout.n_expert else "weights", show(needs.weights_bytes))
        yield _row("KV cache", f"{show(needs.kv_bytes)} for {needs.n_ctx} tokens")
        yield _row("compute", f"{show(needs.compute_bytes)} for batches of {needs.n_batch} tokens")
        yield _row("prompt cache", f"{show(plan.prompt_cache_bytes)} for KV rows of other conversations")
        yield _row(
            "processes", f"about {show(plan.processes_bytes)}, and {show(plan.reserve_bytes)} in reserve"
        )
        yield _row("budget", f"{show(plan.budget.n_bytes)} ({plan.budget.source})")
        yield _row("floor", f"{show(plan.floor_bytes, up=True)}: the least budget that can be served")
        if layout.n_expert:
            yield from self._expert_lines()
        yield _row("speed", self._speed_text())
        for warning in plan.warnings():
            yield _row("warning", warning)

    def _expert_lines(self) -> Iterator[str]:
        plan, layout = self.plan, self.plan.layout
        yield _row("full", f"{show(plan.full_bytes, up=True)}: from there on every expert stays in memory")
        if plan.fits:
            yield _row(
                "slots",
                f"{plan.n_slots} of {layout.n_experts_total} experts fit "
                f"({100 * plan.resident_share:.0f} %) in {show(plan.capacity_bytes)}",
            )
        else:
            yield _row("slots", "the budget is below the floor")
        yield _row(
            "cliff",
            f"{layout.cycle_slots} slots ({show(layout.cycle_bytes)}): the experts of one token; with fewer, "
            "most are read again for each token",
        )
        if self.reader is not None:
            reason = f" ({self.reader['reason']})" if self.reader["reason"] else ""
            yield _row("reads", f"{self.reader['io']}, {self.reader['reader']}{reason}")

    def _speed_text(self) -> str:
        speed, machine = self.speed, self.machine
        if speed is None:
            return "none: the budget is below the floor"
        text = f"{_round(speed.low)} to {_round(speed.high)} tokens per second expected, from "
        if not self.plan.all_resident:
            text += (
                f"{machine.drive_bytes_per_second / 1e9:.2f} GB/s of the drive, hit rates of "
                f"{100 * speed.low_hit_rate:.0f} to {100 * speed.high_hit_rate:.0f} %, and "
            )
        return text + f"{machine.memory_bytes_per_second / 1e9:.1f} GB/s of memory ({self.n_threads} threads)"

    def to_json(self) -> dict[str, Any]:
        """Bytes, but for what names another unit; docs/memory-plan.md describes it."""
        plan, layout, speed = self.plan, self.plan.layout, self.speed
        return {
            "model": {
                "path": str(self.path),
                "name": layout.name,
                "architecture": layout.architecture,
                "file_bytes": layout.file_bytes,
                "tensor_types": dict(layout.tensor_types),
                "n_layer": layout.n_layer,
                "n_ctx_train": layout.n_ctx_train,
                "n_moe_layer": layout.n_moe_layer,
                "n_expert": layout.n_expert,
                "n_expert_used": layout.n_expert_used,
                "dense_bytes": layout.dense_bytes,
                "expert_bytes": layout.expert_bytes,
                "bytes_per_expert": {"min": self.expert_file_bytes[0], "max": self.expert_file_bytes[1]},
            },
            "plan": plan.to_json(),
            "reader": self.reader,
            "measured": {
                "drive_bytes_per_second": self.machine.drive_bytes_per_second,
                "memory_bytes_per_second": self.machine.memory_bytes_per_second,
                "n_threads": self.n_threads,
            },
            "expected": None
            if speed is None
            else {
                "tokens_per_second": {"low": speed.low, "high": speed.high},
                "hit_rate": {"low": speed.low_hit_rate, "high": speed.high_hit_rate},
            },
        }


def inspect_model(configure: Configure) -> Inspection:
    """Reads the headers and simulates the load; reads experts only to measure the drive.

    Raises InspectError.
    """
    try:
        return _inspect(configure)
    except (EngineStartError, LibraryNotFoundError) as error:
        raise InspectError(str(error)) from error
    except NativeError as error:
        raise InspectError(about(configure.model_path, error)) from error


def _inspect(configure: Configure) -> Inspection:
    path = Path(configure.model_path)
    check_file(path)
    bytes_before = resident_bytes()

    def measure() -> Footprint:
        return Footprint(FRONT_END_BYTES, ENGINE_BASE_BYTES + resident_bytes() - bytes_before)

    # what llama.cpp complains of is in the exception, and nothing else is of interest here
    logging.getLogger(NativeLog.__module__).addHandler(logging.NullHandler())
    llama_cpp = load_llama_cpp()
    library, log = Library(), NativeLog(llama_cpp)
    llama_cpp.llama_backend_init()
    n_threads = configure.n_threads or default_thread_count()
    loader = Loader(llama_cpp, library, log, configure, n_threads, measure)
    experts = loader.open_experts()
    try:
        plan = loader.plan(experts)
        drive = 0.0 if experts is None else experts.measure(min(MEASURED_BYTES, plan.layout.expert_bytes))
        return Inspection(
            path=path,
            plan=plan,
            expert_file_bytes=(0, 0) if experts is None else experts.expert_file_bytes,
            reader=None if experts is None else experts.reader(),
            machine=Machine(drive, measure_memory_speed(n_threads)),
            n_threads=n_threads,
        )
    finally:
        if experts is not None:
            experts.close()


def _row(name: str, text: str) -> str:
    return f"{name:<14} {text}"


def _range_text(ends: tuple[int, int]) -> str:
    low, high = ends
    return show(low) if low == high else f"{show(low)} to {show(high)}"


def _round(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
