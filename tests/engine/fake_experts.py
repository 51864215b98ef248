"""An expert cache without a library: its numbers are what a test says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from s2moe.engine.hot_experts import ModelIdentity
from s2moe.engine.native_experts import ExpertStats

LAYOUT: dict[str, Any] = {
    "architecture": "llama",
    "name": "Fake",
    "n_layer": 3,
    "n_expert": 4,
    "n_expert_used": 2,
    "expert_bytes": 7200,
    "layers": [
        {
            "layer": layer,
            "n_expert": 4,
            "parts": [
                {"tensor": f"blk.{layer}.ffn_{part}_exps.weight", "type": "Q4_0", "bytes": 300, "offset": 64}
                for part in ("gate", "up", "down")
            ],
        }
        for layer in (1, 2)
    ],
}
MODEL = ModelIdentity.of_layout(LAYOUT)


@dataclasses.dataclass
class FakeExperts:
    """`layers` 1 and 2 of 4 experts each. `use` counts as decode would."""

    layers: tuple[int, ...] = (1, 2)
    n_experts: int = 4
    used: list[list[int]] = dataclasses.field(default_factory=lambda: [[0] * 4, [0] * 4])
    totals: ExpertStats = dataclasses.field(default_factory=ExpertStats)
    warmed: list[list[list[int]]] = dataclasses.field(default_factory=list)

    def use(self, n_tokens: int, *experts: int) -> None:
        """As many tokens use the same experts in both layers."""
        for row in self.used:
            for expert in experts:
                row[expert] += n_tokens

    def counts(self) -> list[list[int]]:
        return [list(row) for row in self.used]

    def warm(self, counts: Sequence[Sequence[int]]) -> None:
        self.warmed.append([list(row) for row in counts])

    def stats(self) -> ExpertStats:
        return ExpertStats.from_buffer_copy(self.totals)

    def reader(self) -> dict[str, Any]:
        return {"io": "direct", "reader": "threads", "queue_depth": 8, "reason": "io_uring: EPERM"}
