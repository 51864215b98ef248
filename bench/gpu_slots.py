"""Slots for experts on a GPU: decoding under several VRAM budgets, off, exact and balanced.

    .venv/bin/python -m s2moe.bench.gpu_slots [--model GGUF] [--budgets 2GiB,4GiB,…] [--json OUT]

For each budget one server with `--device cuda --vram-budget` answers every question greedily with each method
in turn. A line has tokens per second; its ratio to `off` of the same server; the share of lookups that found
their expert in a slot; bytes copied into slots per token; bytes per second while the GPU copied on demand,
by its own clock, which may be held against the bus (--bus-gbps); the bytes of weights that a token needs per
second, against the card's memory (--memory-gbps); waits for the host and synchronizations per token. All of
it is decode's: neither the prompts nor the first tokens, which come with them, are counted. Needs a GPU and a
build by `make cuda`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from s2moe.bench.answer import Answer, tokens_per_second
from s2moe.bench.prompts import prompts
from s2moe.bench.serving import Samples, Serving, ServingError
from s2moe.engine.demo_model import ensure_demo_model
from s2moe.engine.native import Library
from s2moe.engine.native_experts import model_layout

METHODS: dict[str, dict[str, Any]] = {
    "off": {"speculation": "off"},
    "exact": {"preset": "exact"},
    "balanced": {"preset": "balanced"},
}
GB = 1e9
QUESTIONS = [question for workload in ("qa", "code", "summarise") for question in prompts(workload)[:2]]


@dataclass(frozen=True)
class Counts:
    """Totals of /metrics, of decodes of up to 8 tokens, drafts included."""

    lookups: float
    misses: float
    copied_bytes: float
    demand_bytes: float
    copy_seconds: float
    """For demand_bytes."""
    requests: float
    synchronizations: float

    @classmethod
    def of(cls, samples: Samples) -> Counts:
        def total(name: str, **labels: str) -> float:
            return samples.sum(f"s2moe_{name}", **labels)

        return cls(
            lookups=total("expert_cache_lookups_total", phase="decode"),
            misses=total("expert_cache_lookups_total", phase="decode", result="miss"),
            # what is copied ahead is copied for drafts
            copied_bytes=total("gpu_demand_bytes_total", phase="decode")
            + total("expert_cache_load_bytes_total", source="host", trigger="prefetch"),
            demand_bytes=total("gpu_demand_bytes_total", phase="decode"),
            copy_seconds=total("gpu_copy_seconds_total", phase="decode"),
            requests=total("gpu_host_requests_total", phase="decode"),
            synchronizations=total("gpu_synchronizations_total", phase="decode"),
        )

    def since(self, before: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(asdict(self).values(), asdict(before).values(), strict=True)))


@dataclass(frozen=True)
class Line:
    """One method under one budget."""

    budget: str
    method: str
    tokens_per_second: float
    ratio: float
    """To `off` of the same server."""
    hit_rate: float
    copied_bytes_per_token: float
    copied_gbps: float
    """While the GPU copied on demand, by its own clock; 0 = it did not."""
    weights_gbps: float
    """Bytes of weights that the tokens needed, per second."""
    requests_per_token: float
    synchronizations_per_token: float


def summarise(
    budget: str, method: str, answers: list[Answer], counts: Counts, *, token_bytes: float, off_speed: float
) -> Line:
    """`token_bytes`: of the weights that one token needs; `off_speed`: tokens per second, 0 = this is it."""
    speed = tokens_per_second(answers)
    n_tokens = sum(each.n_intervals for each in answers)
    copied = counts.copied_bytes / n_tokens
    return Line(
        budget=budget,
        method=method,
        tokens_per_second=speed,
        ratio=speed / off_speed if off_speed else 1.0,
        hit_rate=1 - counts.misses / counts.lookups if counts.lookups else 1.0,
        copied_bytes_per_token=copied,
        copied_gbps=counts.demand_bytes / counts.copy_seconds / GB if counts.copy_seconds else 0.0,
        weights_gbps=token_bytes * speed / GB,
        requests_per_token=counts.requests / n_tokens,
        synchronizations_per_token=counts.synchronizations / n_tokens,
    )


def needed_bytes(layout: dict[str, Any]) -> float:
    """Of the weights that one token of plain decoding needs."""
    experts = sum(
        each["expert_bytes"] * min(layout["n_expert_used"], each["n_expert"]) for each in layout["layers"]
    )
    return float(layout["dense_bytes"] + experts)


def table(lines: list[Line], bus_gbps: float | None, memory_gbps: float | None) -> str:
    def of(value: float, limit: float | None) -> str:
        return f"{value:.1f}" if limit is None else f"{value:.1f} ({100 * value / limit:.0f} %)"

    rows = [
        "| VRAM budget | method | tok/s | × off | hit rate | MiB copied per token | GB/s while copying | "
        "GB/s of weights | waits per token | synchronizations per token |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {each.budget} | {each.method} | {each.tokens_per_second:.1f} | {each.ratio:.2f} | "
        f"{100 * each.hit_rate:.0f} % | {each.copied_bytes_per_token / 2**20:.1f} | "
        f"{of(each.copied_gbps, bus_gbps)} | {of(each.weights_gbps, memory_gbps)} | "
        f"{each.requests_per_token:.2f} | {each.synchronizations_per_token:.2f} |"
        for each in lines
    ]
    return "\n".join(rows)


def measure(model: Path, budget: str, n_tokens: int, token_bytes: float) -> list[Line]:
    """Raises ServingError."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        flags = ("--device", "cuda", "--vram-budget", budget)
        server = Serving(model, work, *flags, cache_directory=work / "cache")
        try:
            lines: list[Line] = []
            for method, options in METHODS.items():
                server.chat(QUESTIONS[0], n_tokens, options)  # the slots follow the method
                before = Counts.of(server.metrics())
                answers = [server.chat(question, n_tokens, options) for question in QUESTIONS]
                counts = Counts.of(server.metrics()).since(before)
                off_speed = lines[0].tokens_per_second if lines else 0.0
                lines.append(
                    summarise(
                        *(budget, method, answers, counts), token_bytes=token_bytes, off_speed=off_speed
                    )
                )
            return lines
        finally:
            server.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_slots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF (default: the 64-expert demo model, sigma 0.2)")
    parser.add_argument("--budgets", default="1GiB,1536MiB,2GiB,3GiB", metavar="SIZE,…")
    parser.add_argument("--tokens", type=int, default=128, help="per answer")
    parser.add_argument("--bus-gbps", type=float, help="of the bus to the GPU, to compare with")
    parser.add_argument("--memory-gbps", type=float, help="of the GPU's memory, to compare with")
    parser.add_argument("--json", type=Path, metavar="OUT")
    chosen = parser.parse_args(arguments)
    model = chosen.model or ensure_demo_model(experts=64, used=8, sigma=0.2, progress=print)
    token_bytes = needed_bytes(model_layout(Library(), model))
    lines: list[Line] = []
    try:
        for budget in chosen.budgets.split(","):
            lines += measure(model, budget, chosen.tokens, token_bytes)
            print(table(lines[-len(METHODS) :], chosen.bus_gbps, chosen.memory_gbps), flush=True)
    except ServingError as error:
        print(f"gpu_slots: error: {error}", file=sys.stderr)
        return 1
    print(table(lines, chosen.bus_gbps, chosen.memory_gbps))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(line) for line in lines], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
