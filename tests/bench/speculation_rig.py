"""A server with made-up speeds for the benchmark of speculation, and results without a server."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from s2moe.bench.answer import Answer
from s2moe.bench.serving import Samples, ServingError
from s2moe.bench.speculation.methods import method_named
from s2moe.bench.speculation.results import CellKey, Pair, Results, Sample
from s2moe.bench.workload import Messages

Request = tuple[str, str]
"""Last turn and options of a request."""
N_TOKENS = 64


def answer_of(
    seconds: float,
    *,
    n_tokens: int = N_TOKENS,
    text: str = "…",
    speculation: dict[str, Any] | None = None,
    **timings: float,
) -> Answer:
    return Answer(
        text=text,
        n_prompt_tokens=20,
        n_tokens=n_tokens,
        started_ns=0,
        first_ns=1,
        last_ns=2,
        started_read_bytes=0,
        first_read_bytes=0,
        last_read_bytes=0,
        timings={"predicted_ms": 1e3 * seconds, **timings},
        speculation=speculation,
    )


@dataclass
class FakeServer:
    """Answers at once, and says that it took `seconds[options]`."""

    seconds: dict[str, float]
    refused: set[str] = field(default_factory=set)
    """Options that are an error."""
    dies_at: int | None = None
    """Number of the request at which it ends."""
    asked: list[Request] = field(default_factory=list)
    is_closed: bool = False

    def chat(self, messages: Messages, n_tokens: int, options: dict[str, Any] | None = None, /) -> Answer:
        assert not self.is_closed
        name = json.dumps(options)
        self.asked.append((messages[-1]["content"], name))
        if self.dies_at is not None and len(self.asked) > self.dies_at:
            raise ServingError("the connection broke")
        if name in self.refused:
            raise ServingError("the request was refused: s2moe.speculation")
        seconds = self.seconds.get(name, 1.0)
        return answer_of(seconds, n_tokens=n_tokens, text=messages[-1]["content"])

    def metrics(self) -> Samples:
        labels = '{target="verify"}'
        return Samples(
            f"s2moe_cost_model_r2{labels} 0.97\n"
            f"s2moe_cost_model_mape_ratio{labels} 0.04\n"
            f"s2moe_cost_model_samples{labels} 300\n"
        )

    def close(self) -> None:
        self.is_closed = True


def options_of(name: str) -> str:
    """As the fake server writes them down."""
    return json.dumps(method_named(name).options)


def sample_of(seconds: float, *, n_tokens: int = N_TOKENS, text: str = "same", **speculation: Any) -> Sample:
    return Sample.of(answer_of(seconds, n_tokens=n_tokens, text=text, speculation=speculation))


def pairs_of(*ratios: float, **method: Any) -> list[Pair]:
    """One per prompt, off taking a second."""
    return [
        Pair(prompt, sample_of(1.0 / ratio, **method), sample_of(1.0), method_first=prompt % 2 == 1)
        for prompt, ratio in enumerate(ratios)
    ]


def results_of(cells: dict[CellKey, list[Pair]]) -> Results:
    return Results(facts={"n_tokens": N_TOKENS, "model": {"name": "m.gguf"}}, cells=cells)
