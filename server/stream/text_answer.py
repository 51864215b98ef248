"""What a stream and a whole text completion have in common: identity, order of the choices, accounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from s2moe.engine.messages import Finished
from s2moe.server.stream.choices import total_of
from s2moe.server.stream.usage import performance_of, usage_of


@dataclass(frozen=True)
class TextAnswer:
    """The choices of the first prompt come first; choice i belongs to prompt i // n_per_prompt."""

    completion_id: str
    created: int
    """Unix seconds"""
    model: str
    n_prompts: int
    n_per_prompt: int
    echoes: Sequence[str] = ()
    """Text of each prompt, where it is part of the answer; else empty."""

    @property
    def n_choices(self) -> int:
        return self.n_prompts * self.n_per_prompt

    @property
    def head(self) -> dict[str, Any]:
        return {
            "id": self.completion_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def echo_of(self, choice: int) -> str:
        return self.echoes[choice // self.n_per_prompt] if self.echoes else ""

    def accounts_of(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """Members `usage`, `timings` and `speculation` of an answer whose choices ended like this."""
        total = total_of(finished, per_prompt=self.n_per_prompt)
        return {"usage": usage_of(total), **performance_of(total)}
