"""Is a draft by the model itself, with fewer experts, worth verifying? What the method rests on, measured.

    .venv/bin/python -m s2moe.bench.premise --sections drafts --plots DIR
    .venv/bin/python -m s2moe.bench.premise --sections speed --memory-budget 1500MiB --plots DIR

    drafts   along texts of the target: which experts it uses, and which of them drafts predict, by layer and
             depth; KL divergence by decode step with the shared and with an independent KV cache; acceptance;
             all over the draft's number of experts
    speed    greedy answers with and without speculation in turn, over the draft's number of experts and over
             the cap of reuse gating; prompts in turn, so that none finds its own experts in the cache. With
             the defaults about six minutes at 1500MiB

Texts are what the model itself says to the prompts of bench/prompts, greedily, or a file (--text). Tables go
to standard output, progress to standard error. docs/quality.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from s2moe.bench.plotting import PlottingError, load_pyplot
from s2moe.bench.premise.drafting import N_STEPS, Evaluator, PremiseError, Text, draft_along, record
from s2moe.bench.premise.figures import DraftFigures
from s2moe.bench.premise.plots import draw
from s2moe.bench.premise.report import Premise
from s2moe.bench.premise.speeds import Answerer, Cell, cells_of, measure_speeds
from s2moe.bench.prompts import WORKLOADS, prompts
from s2moe.engine.demo_model import ensure_demo_model
from s2moe.engine.errors import EngineStartError, RequestError
from s2moe.engine.messages import Configure, Speculation
from s2moe.engine.model import Model
from s2moe.engine.native import LibraryNotFoundError, NativeError
from s2moe.engine.output_file import OutputFileError, check_output
from s2moe.engine.text_windows import TextError, cut, read_text
from s2moe.server.settings import parse_budget_bytes

SECTIONS = ("drafts", "speed")
PRESETS = ("exact", "balanced", "fast")
N_CTX = 1024
DRAFT_EXPERTS = (1, 2, 3, 4, 6)
CAP_FACTORS = (1.0, 1.5, 2.0, 2.5, 3.0)
"""Of k."""
SPEED_WORKLOADS = ("qa", "code")
DRAFT_TOKENS = 96
SPEED_TOKENS = 64
WINDOW_TOKENS = 128
MAX_TEXT_BYTES = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        for path in (arguments.json, arguments.markdown):
            if path is not None:
                check_output(path)
        if arguments.plots is not None:
            load_pyplot()  # before the work
        premise = measure(arguments)
    except (PremiseError, TextError, OutputFileError, PlottingError) as error:
        return fail(str(error))
    except (EngineStartError, LibraryNotFoundError, NativeError, RequestError) as error:
        return fail(str(error))
    text = premise.markdown()
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"s2moe": version("s2moe"), **premise.to_json()}, indent=1) + "\n"
        )
    if arguments.markdown is not None:
        arguments.markdown.write_text(text)
    if arguments.plots is not None:
        for path in draw(premise, arguments.plots):
            say(f"written to {path}")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="premise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF (default: the 64-expert demo model, sigma 0.2)")
    parser.add_argument("--sections", type=sections_of, default=SECTIONS, help=",".join(SECTIONS))
    parser.add_argument("--text", type=Path, help="a text for `drafts` in place of the model's own answers")
    parser.add_argument(
        "--workloads",
        type=workloads_of,
        help=f"default: {','.join(WORKLOADS)}; of `speed`: {','.join(SPEED_WORKLOADS)}",
    )
    parser.add_argument("--prompts", type=int, default=2, help="of each workload (default 2)")
    parser.add_argument(
        "--tokens", type=int, help=f"per answer (default {DRAFT_TOKENS}; of `speed`: {SPEED_TOKENS})"
    )
    parser.add_argument(
        "--stride", type=int, default=4, help="tokens between two starts of drafts (default 4)"
    )
    parser.add_argument(
        "--draft-experts", type=numbers_of, help="default 1,2,3,4,6, as far as the model's k goes"
    )
    parser.add_argument("--caps", type=numbers_of, help="of `speed` (default: 1, 1.5, 2, 2.5 and 3 k)")
    parser.add_argument("--preset", choices=PRESETS, default="balanced", help="of `speed`")
    parser.add_argument(
        "--memory-budget", type=size_of, default=0, help="in bytes or as 1500MiB (default: what there is)"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--markdown", type=Path, help="where to write the tables")
    parser.add_argument("--plots", type=Path, help="folder for plots; needs matplotlib")
    arguments = parser.parse_args(argv)
    if arguments.prompts < 1 or arguments.stride < 1:
        parser.error("--prompts and --stride are at least 1")
    if arguments.tokens is not None and arguments.tokens <= N_STEPS:
        parser.error(f"--tokens is more than {N_STEPS}, the steps of a draft")
    return arguments


def sections_of(text: str) -> tuple[str, ...]:
    return chosen_from(SECTIONS, text)


def workloads_of(text: str) -> tuple[str, ...]:
    return chosen_from(WORKLOADS, text)


def chosen_from(names: tuple[str, ...], text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if not set(chosen) <= set(names):
        raise argparse.ArgumentTypeError(f"choose from {','.join(names)}")
    return chosen


def numbers_of(text: str) -> tuple[int, ...]:
    numbers = tuple(int(each) if each.isdecimal() else 0 for each in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("write whole numbers of at least 1, separated by commas")
    return numbers


def size_of(text: str) -> object:
    try:
        return parse_budget_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def measure(arguments: argparse.Namespace) -> Premise:
    # before the load, which takes a while
    text = None if arguments.text is None else read_text(arguments.text, MAX_TEXT_BYTES)
    path = arguments.model or ensure_demo_model(experts=64, used=8, sigma=0.2, progress=say)
    say(f"loading {path}")
    has_speed = "speed" in arguments.sections
    configure = Configure(
        model_path=str(path),
        n_ctx=N_CTX,
        n_batch=0,
        memory_budget_bytes=arguments.memory_budget,
        keep_expert_counts=False,
        prompt_cache_bytes=0,
        speculation=Speculation(method="s2moe" if has_speed else "off"),
    )
    model = Model(configure, lambda _phase, _fraction: None)
    try:
        info, plan = model.info, model.plan
        premise = Premise(
            model={
                "name": info.name,
                "n_expert": info.n_expert,
                "n_expert_used": info.n_expert_used,
                "n_layer": info.n_layer,
            },
            build=info.system_fingerprint,
            memory={}
            if plan is None
            else {
                "budget_bytes": plan.budget.n_bytes,
                "n_slots": plan.n_slots,
                "n_experts": plan.layout.n_experts_total,
            },
        )
        if "drafts" in arguments.sections:
            measure_drafts(model, premise, arguments, text)
        if has_speed:
            measure_speed(model, premise, arguments)
        return premise
    finally:
        model.close()


def measure_drafts(model: Model, premise: Premise, arguments: argparse.Namespace, text: str | None) -> None:
    evaluator = Evaluator(model)
    workloads, n_tokens = arguments.workloads or WORKLOADS, arguments.tokens or DRAFT_TOKENS
    try:
        k = model.info.n_expert_used
        premise.figures = [
            DraftFigures.create(n_experts, n_layer=model.info.n_layer, n_depth=N_STEPS, k=k)
            for n_experts in draft_experts(arguments, k)
        ]
        if text is None:
            texts = prompt_texts(model, workloads, arguments.prompts, n_tokens)
        else:
            n_windows = arguments.prompts * len(workloads)
            texts = file_texts(model, arguments.text, text, n_windows)
        for number, each in enumerate(texts, 1):
            recorded = record(evaluator, each, n_tokens)
            n_starts = draft_along(evaluator, recorded, premise.figures, stride=arguments.stride)
            premise.n_texts += n_starts > 0
            premise.n_starts += n_starts
            say(f"text {number} of {len(texts)}: {len(recorded.tokens)} tokens, {n_starts} starts")
    finally:
        evaluator.close()
    if premise.n_starts == 0:
        raise PremiseError(f"no text goes on for more than {N_STEPS} tokens; choose other prompts or --text")


def measure_speed(model: Model, premise: Premise, arguments: argparse.Namespace) -> None:
    if model.speculator is None:
        raise PremiseError(f"nothing can be drafted for this model: {model.info.speculation_limit}")
    k = model.info.n_expert_used
    caps = arguments.caps or [round(factor * k) for factor in CAP_FACTORS]
    if min(caps) < k:
        raise PremiseError(f"--caps: each is at least the model's k, {k}")
    premise.cells = cells_of(draft_experts(arguments, k), caps, arguments.preset)
    workloads, n_tokens = arguments.workloads or SPEED_WORKLOADS, arguments.tokens or SPEED_TOKENS
    questions = [each.prompt for each in prompt_texts(model, workloads, arguments.prompts, n_tokens)]
    if len(questions) < 2:
        raise PremiseError(
            "`speed` needs two prompts, which it asks in turn; give more --prompts or --workloads"
        )
    n_pairs, n_done, started = len(questions) * len(premise.cells), 0, time.monotonic()

    def on_pair(cell: Cell) -> None:
        nonlocal n_done
        n_done += 1
        left = (time.monotonic() - started) / n_done * (n_pairs - n_done)
        found = cell.speed or "no answer"
        say(f"pair {n_done} of {n_pairs}: {cell.axis} {cell.value}, {found}, about {left:.0f} s left")

    answerer = Answerer(model, model.speculator)
    measure_speeds(answerer.answer, questions, premise.cells, n_tokens, on_pair)


def draft_experts(arguments: argparse.Namespace, k: int) -> list[int]:
    """Raises PremiseError."""
    if arguments.draft_experts is None:
        return [number for number in DRAFT_EXPERTS if number <= k]
    if max(arguments.draft_experts) > k:
        raise PremiseError(f"--draft-experts: each is at most the model's k, {k}")
    return list(arguments.draft_experts)


def prompt_texts(model: Model, workloads: Sequence[str], n_prompts: int, n_tokens: int) -> list[Text]:
    """Those that leave room for the answer and drafts behind it."""
    texts = []
    for workload in workloads:
        for messages in prompts(workload)[:n_prompts]:
            request: dict[str, Any] = {"messages": messages}
            chat = json.loads(model.chat_template.apply(json.dumps(request).encode()))
            prompt = model.tokenize(chat["prompt"])
            if len(prompt) + n_tokens + N_STEPS <= model.n_ctx:
                texts.append(Text(prompt))
            else:
                say(f"a prompt of {workload} is passed over: {len(prompt)} tokens")
    if not texts:
        raise PremiseError(f"no prompt leaves room for {n_tokens} tokens; give smaller --tokens")
    return texts


def file_texts(model: Model, path: Path, text: str, n_windows: int) -> list[Text]:
    n_tokens = n_windows * WINDOW_TOKENS
    windows = cut(model, path, text, n_tokens=n_tokens, window_tokens=WINDOW_TOKENS)
    return [Text(each.tokens[: each.n_prompt], each.tokens[each.n_prompt :]) for each in windows]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fail(message: str) -> int:
    print(f"premise: error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
