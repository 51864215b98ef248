"""A model without a front end, with the expert cache that a server would have."""

from __future__ import annotations

from s2moe.engine.inspection import ENGINE_BASE_BYTES, FRONT_END_BYTES
from s2moe.engine.memory import Footprint, resident_bytes
from s2moe.engine.messages import Configure
from s2moe.engine.model import Model


class PlannedModel(Model):
    """With the slots that `s2moe serve` would give it with the same budget."""

    def __init__(self, configure: Configure, extra_bytes: int = 0) -> None:
        """`extra_bytes`: what the caller takes beside, inside of the budget. Raises EngineStartError."""
        self._bytes_before = resident_bytes()
        self._extra_bytes = extra_bytes
        super().__init__(configure, lambda _phase, _fraction: None)

    def _planned_footprint(self) -> Footprint:
        grown_bytes = resident_bytes() - self._bytes_before
        return Footprint(FRONT_END_BYTES, ENGINE_BASE_BYTES + self._extra_bytes + grown_bytes)
