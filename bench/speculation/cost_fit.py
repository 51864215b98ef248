"""How well the cost model predicts the time of a verification, under memory limits.

    .venv/bin/python -m s2moe.bench.speculation.cost_fit [--limits 1050,1500,2100] [--plots DIR]

For each limit an engine of its own, without a front end, runs under bench/memlimit with the expert cache
that the server would have. It answers prompts of all workloads with drafts, in turn as many as pay and a
fixed number in each step, so that verifications of all widths are among them; then its cost model hands out
the last 256 evaluations: what it predicted before it had learnt from them, and what they took. Prints R² and
MAPE, writes both and the pairs as JSON, and draws them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from s2moe.bench.offload import BUILD
from s2moe.bench.plotting import PlottingError, load_pyplot
from s2moe.bench.process import limited
from s2moe.bench.prompts import N_PROMPTS, WORKLOADS, prompts
from s2moe.bench.speculation.goals import FIT_MAPE, FIT_R2
from s2moe.bench.speculation.plots import predictions
from s2moe.bench.targets import MIB, Line, at_least, at_most, table
from s2moe.bench.workload import N_CTX
from s2moe.engine.demo_model import ensure_demo_model
from s2moe.engine.errors import EngineStartError, RequestError
from s2moe.engine.generation import Generation
from s2moe.engine.messages import Configure, Generate, Sampling, Speculation
from s2moe.engine.native_speculation import Speculator
from s2moe.engine.planned_model import PlannedModel

DEFAULT_LIMITS: Final = "1050,1500,2100"
N_TOKENS: Final = 64
N_SAMPLES: Final = 256
LEAST_SAMPLES: Final = 20
WIDTHS: Final = (None, 1, 2, 4, 7)
"""Drafts verified in each step of an answer; None = as many as pay."""


class CostFitError(Exception):
    """Nothing could be measured; the message says why."""


class SamplingSpeculator:
    """A speculator whose reports carry the samples of its cost model, and that drafts `width` nodes."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self.width: int | None = None
        """Of WIDTHS."""

    def begin(self, options: Mapping[str, Any]) -> None:
        fixed = {} if self.width is None else {"adaptive": False, "max_nodes": self.width}
        self._speculator.begin({**options, **fixed, "samples": True})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._speculator, name)


def measure_here(model_path: Path, budget_bytes: int, n_prompts: int, preset: str) -> dict[str, Any]:
    """In this process: answers `n_prompts` of each workload; the report's cost model of verification.

    Raises CostFitError.
    """
    configure = Configure(
        model_path=str(model_path),
        n_ctx=N_CTX,
        memory_budget_bytes=budget_bytes,
        keep_expert_counts=False,
        prompt_cache_bytes=0,
        speculation=Speculation(method="s2moe", preset=preset),
    )
    try:
        model = PlannedModel(configure)
    except EngineStartError as error:
        raise CostFitError(str(error)) from error
    try:
        speculator = model.speculator
        if speculator is None:
            raise CostFitError(f"nothing can be drafted for {model_path}: {model.speculation.limit}")
        sampling: Any = SamplingSpeculator(speculator)
        model.speculator = sampling
        # one of each workload after the other, as a conversation changes its subject
        widths = itertools.cycle(WIDTHS)
        pairs: dict[tuple[float, float], None] = {}
        for number in range(n_prompts):
            for workload in WORKLOADS:
                sampling.width = next(widths)
                answer(model, f"{workload}-{number}", prompts(workload)[number])
                fit: dict[str, Any] = speculator.report()["costs"]["verify"]
                # reports overlap
                pairs.update(dict.fromkeys((each[0], each[1]) for each in fit.pop("samples")))
        return {**fit, **fit_of(list(pairs)[-N_SAMPLES:])}
    finally:
        model.close()


def answer(model: PlannedModel, name: str, messages: list[dict[str, str]]) -> None:
    """Raises CostFitError."""
    request = Generate(
        request_id=name,
        messages_json=json.dumps(messages).encode(),
        sampling=Sampling(temperature=0.0),
        max_tokens=N_TOKENS,
    )
    try:
        for _ in Generation(model, request).run():
            pass
    except RequestError as error:
        raise CostFitError(f"{name}: {error.message}") from error


def fit_of(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """R² and MAPE of (predicted, measured) seconds. Raises CostFitError where too few were predicted."""
    known = [(predicted, measured) for predicted, measured in pairs if predicted > 0 < measured]
    if len(known) < LEAST_SAMPLES:
        raise CostFitError(f"only {len(known)} verifications were predicted; {LEAST_SAMPLES} are needed")
    predicted, measured = np.asarray(known, dtype=np.float64).T
    residual = float(((measured - predicted) ** 2).sum())
    total = float(((measured - measured.mean()) ** 2).sum())
    return {
        "r2": 1 - residual / total if total > 0 else math.nan,
        "mape": float((np.abs(measured - predicted) / measured).mean()),
        "samples": known,
    }


def measure_limit(model: Path, limit_mib: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own under the limit. Raises CostFitError."""
    command = [sys.executable, "-m", "s2moe.bench.speculation.cost_fit", "--here", str(limit_mib * MIB)]
    command += ["--model", str(model), "--prompts", str(arguments.prompts), "--preset", arguments.preset]
    child = subprocess.run(
        limited(command, limit_mib * MIB, None), stdout=subprocess.PIPE, text=True, check=False
    )
    if child.returncode != 0:
        raise CostFitError(f"{limit_mib} MiB: the measurement ended with {child.returncode}")
    fit: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return fit


def judge(fits: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    lines = []
    for name, fit in fits.items():
        r2, mape, coefficients = fit["r2"], fit["mape"], describe(fit)
        lines += [
            at_least(name, f"R² of {len(fit['samples'])} verifications", r2, FIT_R2),
            at_most(name, "MAPE", 100 * mape, 100 * FIT_MAPE, " %"),
            Line(name, "milliseconds", coefficients),
        ]
    return lines


def describe(fit: Mapping[str, Any]) -> str:
    """The fitted terms."""
    terms = {
        "intercept": "intercept_seconds",
        "row": "row_seconds",
        "resident expert": "hit_seconds",
        "missing expert": "miss_seconds",
    }
    values = {name: 1e3 * float(fit.get(key, math.nan)) for name, key in terms.items()}
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def main(argv: list[str] | None = None) -> int:
    parser = create_parser()
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.prompts <= N_PROMPTS:
        parser.error(f"--prompts: {arguments.prompts} is not from 1 to {N_PROMPTS}")
    try:
        if arguments.here is not None:
            fit = measure_here(arguments.model, arguments.here, arguments.prompts, arguments.preset)
            print(json.dumps(fit))
            return 0
        if arguments.plots is not None:
            load_pyplot()
        model = arguments.model or ensure_demo_model(experts=64, used=8, sigma=0.2, progress=print)
        fits = {}
        for limit in arguments.limits:
            fits[f"{limit} MiB"] = measure_limit(model, limit, arguments)
            print(f"{limit} MiB: measured", file=sys.stderr, flush=True)
    except (CostFitError, PlottingError) as error:
        parser.exit(1, f"cost_fit: error: {error}\n")
    print(table(judge(fits)))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(fits) + "\n")
    if arguments.plots is not None:
        print(f"drawn: {predictions(fits, arguments.plots)}", file=sys.stderr)
    return 0


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cost_fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF (default: the 64-expert demo model, sigma 0.2)")
    parser.add_argument("--limits", type=_limits, default=DEFAULT_LIMITS, metavar="MIB,…")
    parser.add_argument("--prompts", type=int, default=2, metavar="N", help="of each workload")
    parser.add_argument("--preset", choices=("exact", "balanced", "fast"), default="balanced")
    parser.add_argument("--json", type=Path, default=BUILD / "cost-fit.json", metavar="OUT")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="where to draw; needs matplotlib")
    parser.add_argument("--here", type=int, metavar="BYTES", help=argparse.SUPPRESS)
    return parser


def _limits(text: str) -> list[int]:
    try:
        limits = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError("write MiB, separated by commas") from None
    if min(limits) <= 0:
        raise argparse.ArgumentTypeError("a limit is above 0")
    return limits


if __name__ == "__main__":
    sys.exit(main())
