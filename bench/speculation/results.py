"""What one run measured, and its file, which is written after each cell so that a killed run keeps them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from s2moe.bench.answer import Answer
from s2moe.bench.targets import MIB

LEAST_TOKENS: Final = 16
"""Pairs with a shorter answer are kept, but not counted: too few tokens for a time."""
FORMAT: Final = 1

_SPECULATION_KEYS: Final = (
    *("steps", "iterations", "drafted", "admitted", "accepted", "acceptance_length", "mean_tokens_per_step"),
    *("reuse_ratio", "reuse_ratio_ungated", "experts_touched", "misses_avoided", "displaced_weight"),
    *("biased_rows", "draft_seconds", "verify_seconds", "sample_seconds", "stall_seconds"),
    *("controller_state", "disabled_reason", "graph_builds"),
)


class ResultsError(Exception):
    """The file cannot be continued; the message says why and what to do."""


@dataclass(frozen=True)
class Sample:
    """One answer. Times and counts are of its decode; what the prompt took does not count."""

    seconds_per_token: float
    n_tokens: int
    text_digest: str
    lookups_per_token: float | None = None
    """Experts of a layer that an evaluation needed, each once per layer and evaluation. None: no expert
    cache."""
    misses_per_token: float | None = None
    read_bytes_per_token: float | None = None
    stall_share: float | None = None
    """Of the time: what computing waited for reads."""
    speculation: dict[str, Any] = field(default_factory=dict)
    """Of the answer's object `speculation` those keys that are single values; docs/speculation.md
    explains them."""

    @classmethod
    def of(cls, answer: Answer) -> Sample:
        """The first token costs no evaluation of its own, so it does not count. Raises KeyError where
        `timings` lack what every server gives."""
        timings = answer.timings
        n_evaluated = max(1, answer.n_tokens - 1)
        milliseconds = timings["predicted_ms"]

        def per_token(key: str) -> float | None:
            return None if timings.get(key) is None else timings[key] / n_evaluated

        stall = timings.get("predicted_expert_stall_ms")
        speculation = answer.speculation or {}
        return cls(
            seconds_per_token=milliseconds / 1e3 / n_evaluated,
            n_tokens=answer.n_tokens,
            text_digest=hashlib.sha256(answer.text.encode()).hexdigest()[:16],
            lookups_per_token=per_token("predicted_expert_lookups"),
            misses_per_token=per_token("predicted_expert_misses"),
            read_bytes_per_token=per_token("predicted_expert_read_bytes"),
            stall_share=None if stall is None or milliseconds <= 0 else stall / milliseconds,
            speculation={key: speculation[key] for key in _SPECULATION_KEYS if key in speculation},
        )

    def per_token(self, key: str) -> float | None:
        """A count of `speculation` over the tokens that were evaluated."""
        value = self.speculation.get(key)
        return None if value is None else float(value) / max(1, self.n_tokens - 1)


@dataclass(frozen=True)
class Pair:
    """A method and plain decoding on the same prompt, from one server."""

    prompt: int
    method: Sample
    off: Sample
    method_first: bool

    @property
    def counts(self) -> bool:
        return min(self.method.n_tokens, self.off.n_tokens) >= LEAST_TOKENS

    @property
    def ratio(self) -> float:
        """How many times as fast the method is."""
        return self.off.seconds_per_token / self.method.seconds_per_token

    @property
    def same_text(self) -> bool:
        return self.method.text_digest == self.off.text_digest


CellKey = tuple[int | None, str, str]
"""Memory limit in MiB (None: no limit), workload, method."""


def limit_name(limit_mib: int | None) -> str:
    return "no limit" if limit_mib is None else f"{limit_mib} MiB"


@dataclass
class Results:
    """Everything of one file."""

    facts: dict[str, Any]
    """What must be the same for cells to stand in one file: model, build, machine, tokens."""
    cells: dict[CellKey, list[Pair]] = field(default_factory=dict)
    errors: dict[CellKey, str] = field(default_factory=dict)
    """Cells that could not be measured; they are tried again when the run is continued."""
    fits: dict[str, dict[str, float]] = field(default_factory=dict)
    """By limit and server, when it ended: how well the cost model predicts verification."""

    def pairs(
        self,
        method: str,
        *,
        workload: str | None = None,
        limits: tuple[int | None, ...] | None = None,
    ) -> list[Pair]:
        """Those that count, of all workloads and limits that are not narrowed."""
        return [
            pair
            for (limit, each, name), pairs in self.cells.items()
            if name == method and workload in (None, each) and (limits is None or limit in limits)
            for pair in pairs
            if pair.counts
        ]

    def ratios(self, method: str, **chosen: Any) -> list[float]:
        return [pair.ratio for pair in self.pairs(method, **chosen)]

    def values(self, index: int) -> list[Any]:
        """Different parts of the cells' keys, in the order in which they came."""
        return list(dict.fromkeys(key[index] for key in self.cells))

    @property
    def limits(self) -> list[int | None]:
        return self.values(0)

    @property
    def workloads(self) -> list[str]:
        return self.values(1)

    @property
    def methods(self) -> list[str]:
        return self.values(2)

    def missing_prompts(self, key: CellKey, n_prompts: int) -> list[int]:
        measured = {pair.prompt for pair in self.cells.get(key, [])}
        return [prompt for prompt in range(n_prompts) if prompt not in measured]

    def save(self, path: Path) -> None:
        """Replaces the file as a whole. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text("".join(self._lines()))
        part.replace(path)

    def _lines(self) -> Iterator[str]:
        """One line for each pair: readable, and small in a difference."""
        head = {"format": FORMAT, "facts": self.facts, "fits": self.fits}
        yield json.dumps(head, indent=1)[:-2] + ',\n "errors": [\n'
        yield ",\n".join(json.dumps({**_key_object(key), "error": text}) for key, text in self.errors.items())
        yield '\n ],\n "pairs": [\n'
        yield ",\n".join(
            json.dumps({**_key_object(key), **asdict(pair)})
            for key, pairs in self.cells.items()
            for pair in pairs
        )
        yield "\n ]\n}\n"

    @classmethod
    def load(cls, path: Path) -> Results:
        """Raises ResultsError."""
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise ResultsError(f"{path} is of format {data['format']}, not {FORMAT}; measure again")
            results = cls(facts=data["facts"], fits=data["fits"])
            for entry in data["pairs"]:
                key = _key_of(entry)
                pair = Pair(
                    prompt=entry["prompt"],
                    method=Sample(**entry["method"]),
                    off=Sample(**entry["off"]),
                    method_first=entry["method_first"],
                )
                results.cells.setdefault(key, []).append(pair)
            results.errors = {_key_of(entry): entry["error"] for entry in data["errors"]}
        except OSError as error:
            raise ResultsError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{path} is not a file of this benchmark ({error!r})") from error
        return results

    @classmethod
    def resume(cls, path: Path, facts: dict[str, Any]) -> Results:
        """Raises ResultsError where the file was measured under other facts."""
        results = cls.load(path)
        other = [name for name in facts if results.facts.get(name) != facts[name]]
        if other:
            raise ResultsError(
                f"{path} was measured with another {', '.join(other)}; choose another --json, or leave out "
                "--resume"
            )
        return results


def _key_object(key: CellKey) -> dict[str, Any]:
    limit, workload, name = key
    return {"limit_mib": limit, "workload": workload, "name": name}


def _key_of(entry: dict[str, Any]) -> CellKey:
    return entry["limit_mib"], entry["workload"], entry["name"]


def limit_bytes(limit_mib: int | None) -> int | None:
    return None if limit_mib is None else limit_mib * MIB
