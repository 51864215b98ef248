"""Keeps what front end and engine use within the budget while they serve, at the cost of kept conversations
and of slots."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from s2moe.engine.memory import MIB
from s2moe.engine.native_experts import ExpertStats
from s2moe.engine.plan import show

logger = logging.getLogger(__name__)

SHRINK_CACHE = "shrink_cache"
GROW_CACHE = "grow_cache"
DROP_PROMPT_CACHE = "drop_prompt_cache"
"""What is done about memory pressure, as metrics name it."""
MARGIN_BYTES = 4 * MIB
"""So near to the budget use may come: it grows on until the next check."""
STEP_BYTES = 8 * MIB
"""Given back beyond the excess, so that slow growth does not cost slots every second."""
GROW_AFTER_SECONDS = 30.0
"""So long there must be room before slots are taken back; each time that they were given back doubles it."""
GROW_AFTER_AT_MOST_SECONDS = 3600.0


class ResizableExperts(Protocol):
    """What the guard does to an expert cache; `native_experts.Experts` is one."""

    def stats(self) -> ExpertStats: ...

    def shrink(self, capacity_bytes: int) -> int: ...

    def grow(self, capacity_bytes: int) -> int: ...


class Droppable(Protocol):
    """What can be done without; `prompt_cache.PromptCache` is one."""

    def drop(self, n_bytes: int) -> int:
        """Frees n_bytes, or all that there is. Returns how many became free."""
        ...


class MemoryGuard:
    """Compares use with the budget at each `check`. Before it is exceeded, what can be done without is
    dropped, and if that is not enough the cache shrinks; when there has been room again for a while, it grows
    back."""

    def __init__(
        self,
        experts: ResizableExperts,
        budget_bytes: int,
        measure_bytes: Callable[[], int],
        droppable: Droppable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`measure_bytes` returns the resident set of both processes; `clock` seconds."""
        self._experts = experts
        self._budget_bytes = budget_bytes
        self._measure_bytes = measure_bytes
        self._droppable = droppable
        self._clock = clock
        self._at_floor = False
        self._full_bytes = 0
        """Of the slots before any were given back."""
        self._grow_after = GROW_AFTER_SECONDS / 2
        self._room_since: float | None = None
        self.n_shrinks = 0
        """Times that slots were given back."""
        self.n_grows = 0
        """Times that some of them were taken again."""
        self.n_drops = 0
        """Times that something else was."""

    def check(self) -> None:
        """Not during a decode."""
        used_bytes = self._measure_bytes()
        if self._excess_of(used_bytes) > 0 and self._drop(self._excess_of(used_bytes)):
            used_bytes = self._measure_bytes()
        excess_bytes = self._excess_of(used_bytes)
        if excess_bytes <= 0:
            self._at_floor = False
            self._grow(-excess_bytes)
            return
        self._room_since = None
        if self._at_floor:
            return
        before_bytes = self._experts.stats().capacity_bytes
        self._full_bytes = max(self._full_bytes, before_bytes)
        capacity_bytes = self._experts.shrink(max(0, before_bytes - excess_bytes - STEP_BYTES))
        if capacity_bytes < before_bytes:
            self.n_shrinks += 1
            self._grow_after = min(2 * self._grow_after, GROW_AFTER_AT_MOST_SECONDS)
            logger.warning(
                "front end and engine use %s of the budget of %s, so the expert cache shrinks from %s to %s",
                *(
                    show(n_bytes)
                    for n_bytes in (used_bytes, self._budget_bytes, before_bytes, capacity_bytes)
                ),
            )
        else:
            self._at_floor = True
            logger.error(
                "front end and engine use %s of the budget of %s, and the expert cache cannot shrink "
                "below %s; raise --memory-budget",
                *(show(n_bytes) for n_bytes in (used_bytes, self._budget_bytes, capacity_bytes)),
            )

    def _grow(self, room_bytes: int) -> None:
        """Takes slots back when there was room for some for long enough."""
        if self.n_shrinks == 0:
            return
        stats = self._experts.stats()
        # empty slots will be filled
        room_bytes -= stats.capacity_bytes - stats.resident_bytes + STEP_BYTES
        if room_bytes < STEP_BYTES or stats.capacity_bytes >= self._full_bytes:
            self._room_since = None
            return
        now = self._clock()
        if self._room_since is None:
            self._room_since = now
        if now - self._room_since < self._grow_after:
            return
        self._room_since = None
        capacity_bytes = self._experts.grow(min(self._full_bytes, stats.capacity_bytes + room_bytes))
        if capacity_bytes > stats.capacity_bytes:
            self.n_grows += 1
            logger.info(
                "there is room in the budget again: the expert cache grows from %s to %s",
                *(show(stats.capacity_bytes), show(capacity_bytes)),
            )

    def _excess_of(self, used_bytes: int) -> int:
        return used_bytes - (self._budget_bytes - MARGIN_BYTES)

    def _drop(self, excess_bytes: int) -> bool:
        """Returns whether anything was dropped."""
        freed_bytes = 0 if self._droppable is None else self._droppable.drop(excess_bytes + STEP_BYTES)
        if freed_bytes <= 0:
            return False
        self.n_drops += 1
        logger.warning(
            "front end and engine come close to the budget of %s, so %s of the prompt cache are dropped",
            *(show(self._budget_bytes), show(freed_bytes)),
        )
        return True
