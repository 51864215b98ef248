"""Faults of the drive under a model that drafts, each a function of its own in a process of its own.

    python speculation_fault_cases.py CASE MODEL

The process has fault_shim.c preloaded and reads by threads, which the shim can reach. It exits 0 when all
went as it should; an exception, or a signal, is what the test reports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from s2moe.engine.native import NativeError, Status

from fault_cases import require
from fault_control import Faults
from speculation_model import (
    EXACT,
    Answer,
    Run,
    SpeculationModel,
    kv_bytes,
    last_positions,
    make_batch_invariant,
    plain_answer,
)
from stored_model import PROMPT, settle

N_TOKENS = 40
GATED = {"preset": "fast", "adaptive": False}


class Scene:
    """A model whose cache is at its floor, what it says when all is well, and the faults to arm."""

    def __init__(self, path: Path) -> None:
        self.faults = Faults.shared()
        make_batch_invariant()
        with SpeculationModel(path) as healthy:
            self.expected: Answer = plain_answer(healthy, PROMPT, N_TOKENS)
        self.model = SpeculationModel(path, share=0, reader="threads")

    def forget_experts(self) -> None:
        self.model.experts.allocate(self.model.experts.floor_bytes)

    def require_right(self, options: dict[str, object] = EXACT) -> None:
        answer = self.model.answer(PROMPT, N_TOKENS, options)
        require(answer == self.expected, answer.difference(self.expected))

    def refuse(self, run: Run, status: Status) -> NativeError:
        """Makes a step, which must fail with this status and leave everything as it was."""
        before, positions = kv_bytes(self.model), last_positions(self.model)
        try:
            run.step(N_TOKENS)
        except NativeError as error:
            require(error.status == status, f"{error.status.name} instead of {status.name}: {error}")
            require(bool(error.message), "the error has no message")
            require(last_positions(self.model) == positions, "positions changed")
            require(kv_bytes(self.model) == before, "the KV cache changed")
            return error
        raise AssertionError(f"a step in spite of the fault, expected {status.name}")


def read_errors_in_steps(scene: Scene) -> None:
    """EIO after any number of good reads: the answer goes on where it was when the drive recovers."""
    for options in (EXACT, EXACT | {"prefetch": False}):
        run = Run(scene.model, PROMPT, options)
        for n_spared in (0, 1, 2, 5, 8, 0, 3):
            scene.forget_experts()
            scene.faults.fail_reads(n_spared)
            error = scene.refuse(run, Status.IO)
            require(scene.model.path.name in error.message, f"the file is not named: {error}")
            scene.refuse(run, Status.IO)
            settle(scene.model.experts)
            scene.faults.clear()
            run.step(N_TOKENS - len(run.answer.tokens))
        while len(run.answer.tokens) < N_TOKENS:
            run.step(N_TOKENS - len(run.answer.tokens))
        answer = run.close()
        require(answer == scene.expected, answer.difference(scene.expected))
        require(answer.report["n_accepted"] < answer.report["n_admitted"], "nothing was rejected")
    scene.require_right()


def one_read_error(scene: Scene) -> None:
    """A drive that fails once: in a prefetch, which is read again, or in a step, which is repeated."""
    n_failed = 0
    for n_spared in range(0, 60, 3):
        scene.forget_experts()
        run = Run(scene.model, PROMPT, EXACT)
        scene.faults.fail_reads(n_spared, n_failing=1)
        while len(run.answer.tokens) < N_TOKENS:
            before = kv_bytes(scene.model)
            try:
                run.step(N_TOKENS - len(run.answer.tokens))
            except NativeError as error:
                require(error.status == Status.IO, f"{error.status.name}: {error}")
                require(kv_bytes(scene.model) == before, "the KV cache changed")
                n_failed += 1
        scene.faults.clear()
        answer = run.close()
        require(answer == scene.expected, answer.difference(scene.expected))
    require(n_failed > 0, "no step failed")
    scene.require_right()


def read_errors_while_gating(scene: Scene) -> None:
    """The budget of a response counts what was committed, not what failed."""
    run = Run(scene.model, PROMPT, GATED)
    for i in range(10):
        before = scene.model.speculator.report()
        if i % 2:
            scene.forget_experts()
            scene.faults.fail_reads(i)
            scene.refuse(run, Status.IO)
            settle(scene.model.experts)
            scene.faults.clear()
            after = scene.model.speculator.report()
            for key in ("displaced_weight", "n_token_layers", "n_committed_rows", "n_tokens"):
                require(after[key] == before[key], f"{key} counts a step that failed")
        run.step()
        report = scene.model.speculator.report()
        spent = report["error_budget"] * report["n_token_layers"]
        require(report["displaced_weight"] <= spent * (1 + 1e-9), "the budget is exceeded")
    run.close()
    scene.require_right()


def slow_reads(scene: Scene) -> None:
    """Prefetches that are on their way when the verification needs them, or still when the answer ends."""
    scene.faults.delay_us = 1000
    scene.require_right()
    stats = scene.model.experts.stats()
    require(stats.prefetches_late > 0, "no prefetch was late")
    scene.faults.clear()
    scene.require_right()


CASES: dict[str, Callable[[Scene], None]] = {
    case.__name__: case
    for case in (read_errors_in_steps, one_read_error, read_errors_while_gating, slow_reads)
}


def main(case: str, model: str) -> None:
    scene = Scene(Path(model))
    CASES[case](scene)
    scene.model.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
