"""Greedy answers with speculation against plain decoding, token by token and bit by bit.

    .venv/bin/python -m s2moe.bench.exactness [--model PATH …] [--prompts 200] [--tokens 128] [--forced]
                                              [--memory-budget BYTES] [--threads N] [--json OUT]

Both run in one process on one context, speculation with the preset `exact`. Compared are the tokens, and the
logits behind each of them. Where they differ, it is said whether the two best logits of plain decoding were
closer than `--tolerance`: a near-tie, which another order of summation may decide otherwise. `--forced`
drafts in every step, also where that does not pay. Exits with 1 when anything differs, be it a bit, and when
`--forced` drafted nothing: then nothing was tried. Several models are compared one after the other.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import islice, product
from pathlib import Path
from typing import Any, Final

import numpy as np

from s2moe.engine.cpu import default_thread_count
from s2moe.engine.demo_model import ensure_demo_model
from s2moe.engine.messages import Configure, Speculation
from s2moe.engine.model import Model
from s2moe.engine.native import Sampler
from s2moe.engine.native_speculation import N_VERIFY_ROWS, Speculator
from s2moe.engine.output_file import OutputFileError, check_output

N_CTX: Final = 1024
TOLERANCE: Final = 1e-3
REPORT_EVERY_SECONDS: Final = 10.0

_TASKS: Final = (
    "Tell me a short story about {}.",
    "Explain {} to a child of ten years.",
    "Write a Python class that describes {}, with two methods.",
    "List five facts about {}.",
    "Compare {} with a clock: what do they share, and where do they differ?",
    "Write a letter to a friend in which you complain about {}.",
    "Translate into French: I have never seen {} before, and I like it.",
    "What would a historian of the year 2200 write about {}?",
    "If {} costs 12 coins and I have 50, how many can I buy, and what is left? Explain step by step.",
    "Write instructions, step by step, for someone who has to repair {}.",
)
_SUBJECTS: Final = (
    "a river", "a lighthouse", "a bicycle", "the moon", "a bakery", "a violin", "a railway station",
    "a volcano", "an old library", "a market", "a storm", "a kitchen", "a sailing ship", "a garden",
    "a bridge", "a telescope", "a windmill", "a school", "a map", "a winter coat",
)  # fmt: skip


class ExactnessError(Exception):
    """Nothing can be compared; the message is one line with the remedy."""


@dataclass
class Answer:
    """Tokens, and of the logits that each was chosen from the hash and the lead of the best."""

    tokens: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)


@dataclass
class Totals:
    """Of all prompts."""

    n_prompts: int = 0
    n_tokens: int = 0
    n_rows_compared: int = 0
    """Rows of logits, one for each token up to where the texts part."""
    n_rows_of_other_bits: int = 0
    n_near_ties: int = 0
    """Tokens of plain decoding that were chosen by less than the tolerance."""
    n_other_texts: int = 0
    n_other_texts_at_near_ties: int = 0
    """Of them, those that part at such a token."""
    n_steps: int = 0
    """Evaluations of the target with speculation."""
    n_iterations: int = 0
    """Steps that verified drafts."""
    n_admitted: int = 0
    n_accepted: int = 0
    plain_seconds: float = 0.0
    speculation_seconds: float = 0.0
    differences: list[str] = field(default_factory=list)

    def add(self, prompt: str, plain: Answer, ours: Answer, tolerance: float) -> None:
        self.n_prompts += 1
        self.n_tokens += len(plain.tokens)
        self.n_near_ties += sum(lead < tolerance for lead in plain.leads)
        pairs = zip(plain.hashes, ours.hashes, strict=False)
        n_same = next(
            (i for i, (a, b) in enumerate(zip(plain.tokens, ours.tokens, strict=False)) if a != b), None
        )
        # behind another token everything is another
        n_compared = len(plain.tokens) if n_same is None else n_same + 1
        compared = [a != b for a, b in islice(pairs, n_compared)]
        n_other_bits = sum(compared)
        self.n_rows_compared += len(compared)
        self.n_rows_of_other_bits += n_other_bits
        if n_same is not None:
            self.n_other_texts += 1
            self.n_other_texts_at_near_ties += plain.leads[n_same] < tolerance
            self.differences.append(
                f"{prompt!r}: token {n_same} differs, where the best led by {plain.leads[n_same]:.2e}"
            )
        elif n_other_bits:
            self.differences.append(
                f"{prompt!r}: the same text from logits of which {n_other_bits} rows differ"
            )

    def add_report(self, report: dict[str, Any]) -> None:
        for key in ("n_steps", "n_iterations", "n_admitted", "n_accepted"):
            setattr(self, key, getattr(self, key) + report[key])

    @property
    def is_exact(self) -> bool:
        return self.n_rows_of_other_bits == 0 and self.n_other_texts == 0


class Comparison:
    """A model that answers prompts twice."""

    def __init__(self, model: Model, options: dict[str, Any], n_tokens: int) -> None:
        """Raises ExactnessError."""
        if model.speculator is None:
            raise ExactnessError("this model cannot be drafted for; compare another with --model")
        self._model = model
        self._speculator: Speculator = model.speculator
        self._options = options
        self._n_tokens = n_tokens
        self.totals = Totals()

    def answer_twice(self, question: str, tolerance: float) -> None:
        request = json.dumps({"messages": [{"role": "user", "content": question}]}).encode()
        prompt = self._model.tokenize(json.loads(self._model.chat_template.apply(request))["prompt"])
        self._model.forget()
        begun = time.monotonic()
        plain = self._plain(prompt)
        middle = time.monotonic()
        ours = self._speculative(prompt, len(plain.tokens))
        self.totals.plain_seconds += middle - begun
        self.totals.speculation_seconds += time.monotonic() - middle
        self.totals.add(question, plain, ours, tolerance)
        self.totals.add_report(self._speculator.report())

    def _prefill(self, prompt: list[int]) -> Sampler:
        n_kept = self._model.reuse_prefix(prompt, exact=True)
        for begin in range(n_kept, len(prompt) - 1, self._model.n_batch):
            self._model.decode(prompt[begin : min(begin + self._model.n_batch, len(prompt) - 1)])
        sampler = Sampler(self._model.library, self._model.handle, {"temperature": 0})
        sampler.accept_prompt(prompt)
        return sampler

    def _plain(self, prompt: list[int]) -> Answer:
        sampler, answer, token = self._prefill(prompt), Answer(), prompt[-1]
        while len(answer.tokens) < self._n_tokens:
            self._model.decode([token])
            self._look(answer, -1)
            token = sampler.sample(self._model.context)
            answer.tokens.append(token)
            if self._model.is_end(token):
                break
        sampler.close()
        return answer

    def _speculative(self, prompt: list[int], n_tokens: int) -> Answer:
        sampler, answer, root = self._prefill(prompt), Answer(), prompt[-1]
        self._speculator.begin(self._options)
        while len(answer.tokens) < n_tokens:
            n_max = min(n_tokens - len(answer.tokens), N_VERIFY_ROWS)
            tokens = self._model.speculate(self._speculator, sampler, root, n_max, is_retried=False)
            for row in self._speculator.rows():
                self._look(answer, row.logits_index)
            answer.tokens += tokens
            root = tokens[-1]
            if self._model.is_end(root):
                break
        sampler.close()
        return answer

    def _look(self, answer: Answer, index: int) -> None:
        pointer = self._model.llama_cpp.llama_get_logits_ith(self._model.context, index)
        row = np.ctypeslib.as_array(
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._model.info.n_vocab,)
        )
        second, best = np.partition(row, -2)[-2:]
        answer.hashes.append(blake2b(row.tobytes(), digest_size=16).digest())
        answer.leads.append(float(best - second))


def questions(n: int) -> list[str]:
    """At most 200, all different; neighbours have the same task."""
    return [task.format(subject) for task, subject in islice(product(_TASKS, _SUBJECTS), n)]


def compare(
    model: Model, arguments: argparse.Namespace, progress: Callable[[str], None] = lambda _line: None
) -> Totals:
    """Raises ExactnessError."""
    options = {"preset": "exact", "adaptive": not arguments.forced}
    comparison = Comparison(model, options, arguments.tokens)
    n_all, report_at = len(questions(arguments.prompts)), time.monotonic() + REPORT_EVERY_SECONDS
    for number, question in enumerate(questions(arguments.prompts), 1):
        comparison.answer_twice(question, arguments.tolerance)
        if time.monotonic() >= report_at or number == n_all:
            report_at = time.monotonic() + REPORT_EVERY_SECONDS
            totals = comparison.totals
            progress(
                f"{number} of {n_all} prompts, {totals.n_tokens} tokens, {totals.n_other_texts} other texts, "
                f"{totals.n_rows_of_other_bits} rows of other bits"
            )
    return comparison.totals


def table(totals: Totals, tolerance: float) -> str:
    per_iteration = totals.n_accepted / totals.n_iterations if totals.n_iterations else 0.0
    lines = [
        ("prompts", f"{totals.n_prompts}"),
        ("tokens", f"{totals.n_tokens}"),
        ("texts that differ", f"{totals.n_other_texts}"),
        (f"of them at near-ties (lead below {tolerance:g})", f"{totals.n_other_texts_at_near_ties}"),
        ("rows of logits compared", f"{totals.n_rows_compared}"),
        ("rows of logits that differ in a bit", f"{totals.n_rows_of_other_bits}"),
        ("near-ties of plain decoding", f"{totals.n_near_ties}"),
        ("steps with drafts", f"{totals.n_iterations} of {totals.n_steps}"),
        ("drafts verified", f"{totals.n_admitted}"),
        ("drafts accepted per iteration", f"{per_iteration:.2f}"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in lines)])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, nargs="+", help="GGUF files (default: the 16-expert demo model)"
    )
    parser.add_argument("--prompts", type=int, default=200, help="at most 200")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--forced", action="store_true", help="draft in every step")
    parser.add_argument(
        "--memory-budget", type=int, default=0, metavar="BYTES", help="0: the machine's memory"
    )
    parser.add_argument("--threads", type=int, default=default_thread_count())
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of the lead at a near-tie")
    parser.add_argument(
        "--json", type=Path, help="where to write the counts, too, a list with one of each model"
    )
    return parser.parse_args(arguments)


def compare_model(path: Path, arguments: argparse.Namespace) -> Totals:
    """Raises ExactnessError."""
    model = Model(
        Configure(
            model_path=str(path),
            n_ctx=N_CTX,
            n_threads=arguments.threads,
            memory_budget_bytes=arguments.memory_budget,
            keep_expert_counts=False,
            prompt_cache_bytes=0,
            speculation=Speculation(method="s2moe"),
        ),
        lambda _phase, _fraction: None,
    )
    try:
        totals = compare(model, arguments, lambda line: print(line, file=sys.stderr))
    finally:
        model.close()
    if arguments.forced and totals.n_admitted == 0:
        raise ExactnessError(
            f"{path.name}: --forced, but none of {totals.n_steps} steps had a draft, so nothing was tried; "
            "give more --tokens"
        )
    return totals


def result_of(path: Path, totals: Totals, arguments: argparse.Namespace) -> dict[str, Any]:
    """What --json has of a model: the totals, and what they were measured with."""
    return {
        "model": path.name,
        "forced": arguments.forced,
        "memory_budget_bytes": arguments.memory_budget,
        "tolerance": arguments.tolerance,
        "is_exact": totals.is_exact,
        **asdict(totals),
    }


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        if arguments.json is not None:
            check_output(arguments.json)
    except OutputFileError as error:
        print(f"exactness: error: {error}", file=sys.stderr)
        return 1
    results, status = [], 0
    for path in arguments.model or [ensure_demo_model(progress=print)]:
        try:
            totals = compare_model(path, arguments)
        except ExactnessError as error:
            print(f"exactness: error: {error}", file=sys.stderr)
            status = 1
            continue
        print(f"{path.name}\n\n{table(totals, arguments.tolerance)}\n")
        for line in totals.differences:
            print(line)
        results.append(result_of(path, totals, arguments))
        status = status if totals.is_exact else 1
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
