"""What the fake engine answers to the page, and what it reports of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fake_engine import Action, Script, finished, started, step

from s2moe.engine.messages import (
    EngineStats,
    ExpertActivity,
    ExpertCache,
    ExpertPhase,
    Failed,
    Generate,
    MemoryPool,
)

MIB = 2**20


def saying(*texts: str, reasoning: Sequence[str] = ()) -> Script:
    """One step per text, reasoning first."""

    def script(request: Generate) -> Sequence[Action]:
        thoughts = [step(request, reasoning=each) for each in reasoning]
        steps = [step(request, each) for each in texts]
        return [started(request), *thoughts, *steps, finished(request, tokens=len(thoughts) + len(steps))]

    return script


def pausing(first: str, gate: asyncio.Event, second: str) -> Script:
    """`first`, and the rest when the gate opens."""

    def script(request: Generate) -> Sequence[Action]:
        return [started(request), step(request, first), gate, step(request, second), finished(request)]

    return script


def in_turn(*scripts: Script) -> Script:
    """The first script for the first request, and so on."""
    left = iter(scripts)
    return lambda request: next(left)(request)


def failing(code: str, message: str, *texts: str) -> Script:
    """Fails after some text, or before any."""

    def script(request: Generate) -> Sequence[Action]:
        steps: list[Action] = [started(request), *(step(request, each) for each in texts)] if texts else []
        return [*steps, Failed(request_id=request.request_id, code=code, message=message)]

    return script


def stats(*, hits: int = 0, misses: int = 0) -> EngineStats:
    """Of an engine with an expert cache: 300 of 400 MiB in use, one pool beyond its budget."""
    return EngineStats(
        kv_cache_tokens=1234,
        kv_cache_capacity_tokens=4096,
        experts=ExpertActivity(
            decode=ExpertPhase(hits=hits, misses=misses), prefill=ExpertPhase(misses=1000)
        ),
        expert_cache=ExpertCache(resident_experts=96, capacity_experts=128),
        memory_pools=[
            MemoryPool(pool="weights", budget_bytes=100 * MIB, used_bytes=100 * MIB),
            MemoryPool(pool="kv", budget_bytes=50 * MIB, used_bytes=60 * MIB),
            MemoryPool(pool="expert_cache", budget_bytes=250 * MIB, used_bytes=140 * MIB),
        ],
        memory_available_bytes=512 * MIB,
        memory_total_bytes=2048 * MIB,
    )
