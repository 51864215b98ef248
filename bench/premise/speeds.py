"""Speed and acceptance of the whole method over the draft's experts and over the cap of reuse gating."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from s2moe.bench.speculation.grid import schedule
from s2moe.bench.speculation.ratios import Estimate, estimate
from s2moe.engine.model import Model
from s2moe.engine.native import Sampler
from s2moe.engine.native_speculation import Speculator

OFF: Final[dict[str, Any]] = {"method": "off"}


@dataclass(frozen=True)
class Answered:
    n_tokens: int
    seconds: float
    """From the first token to the last."""
    report: Mapping[str, Any]

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.n_tokens


@dataclass
class Cell:
    """One way to draft, paired with plain decoding on the same prompts."""

    axis: str
    """What is varied: `draft_experts` or `reuse_cap`."""
    value: int
    preset: str
    ratios: list[float] = field(default_factory=list)
    """Seconds per token of plain decoding over the method's."""
    tokens_per_second: list[float] = field(default_factory=list)
    n_accepted: int = 0
    n_iterations: int = 0
    n_steps: int = 0
    n_tokens: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {"method": "s2moe", "preset": self.preset, self.axis: self.value}

    def add(self, drafted: Answered, plain: Answered) -> None:
        self.ratios.append(plain.seconds_per_token / drafted.seconds_per_token)
        self.tokens_per_second.append(1 / drafted.seconds_per_token)
        for name in ("n_accepted", "n_iterations", "n_steps", "n_tokens"):
            setattr(self, name, getattr(self, name) + drafted.report[name])

    @property
    def speed(self) -> Estimate | None:
        return estimate(self.ratios)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step that verified drafts, the target's own included."""
        return 1 + self.n_accepted / self.n_iterations if self.n_iterations else None

    @property
    def mean_tokens_per_step(self) -> float | None:
        return self.n_tokens / self.n_steps if self.n_steps else None

    def to_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "value": self.value,
            "preset": self.preset,
            "ratios": self.ratios,
            "tokens_per_second": self.tokens_per_second,
            "acceptance_length": self.acceptance_length,
            "mean_tokens_per_step": self.mean_tokens_per_step,
        }


class Answerer:
    """Answers prompts greedily with a model's speculator."""

    def __init__(self, model: Model, speculator: Speculator) -> None:
        self._model = model
        self._speculator = speculator

    def answer(self, prompt: list[int], options: Mapping[str, Any], n_tokens: int) -> Answered:
        """n_tokens at most, of which there may be none. The prompt's KV is reused from an answer before."""
        model = self._model
        for start in range(model.reuse_prefix(prompt, exact=True), len(prompt), model.n_batch):
            model.decode(prompt[start : start + model.n_batch])
        sampler = Sampler(model.library, model.handle, {"temperature": 0})
        try:
            sampler.accept_prompt(prompt)
            root = sampler.sample(model.context)
            self._speculator.begin(options)
            n_done, seconds = 0, 0.0
            while n_done < n_tokens and not model.is_end(root):
                started = time.perf_counter()
                n_max = n_tokens - n_done
                tokens = model.speculate(self._speculator, sampler, root, n_max, is_retried=False)
                seconds += time.perf_counter() - started
                n_done += len(tokens)
                root = tokens[-1]
            return Answered(n_done, seconds, self._speculator.report())
        finally:
            sampler.close()


def cells_of(draft_experts: Sequence[int], caps: Sequence[int], preset: str) -> list[Cell]:
    """Each axis with the other at its default."""
    return [Cell("draft_experts", value, preset) for value in draft_experts] + [
        Cell("reuse_cap", value, preset) for value in caps
    ]


def measure_speeds(
    answer: Callable[[list[int], Mapping[str, Any], int], Answered],
    prompts: Sequence[list[int]],
    cells: Sequence[Cell],
    n_tokens: int,
    on_pair: Callable[[Cell], None],
) -> None:
    """Pairs of a method and plain decoding, in the order of the benchmark of speculation (`schedule`): no
    measured answer follows one to its own prompt, which would leave just its experts in the cache. At least
    two prompts. Each cell is warmed up with the last of them."""
    if len(prompts) < 2:
        raise ValueError("one prompt alone finds its own experts in the cache")
    last = -1

    def ask(number: int, options: Mapping[str, Any]) -> Answered:
        nonlocal last
        if number == last:
            answer(prompts[number - 1], OFF, n_tokens)
        last = number
        return answer(prompts[number], options, n_tokens)

    for cell in cells:
        answer(prompts[-1], cell.options, n_tokens)
        last = len(prompts) - 1
        answers: dict[tuple[int, bool], Answered] = {}
        for number, is_method in schedule(range(len(prompts))):
            answers[number, is_method] = ask(number, cell.options if is_method else OFF)
            if (number, not is_method) in answers:
                drafted, plain = answers[number, True], answers[number, False]
                if drafted.n_tokens and plain.n_tokens:
                    cell.add(drafted, plain)
                on_pair(cell)
