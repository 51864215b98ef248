"""What a verification of several tokens costs, against as many single decodes.

    .venv/bin/python -m s2moe.bench.verification [--model M]

All experts are in memory. A text is evaluated once for each width, in batches of that many neighbouring
tokens of which all logits are wanted, as in a verification; so tokens share experts as real ones do. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from s2moe.bench.prompts import prompts
from s2moe.engine.demo_model import ensure_demo_model
from s2moe.engine.messages import Configure, Speculation
from s2moe.engine.model import Model
from s2moe.engine.native_speculation import N_VERIFY_ROWS

N_PROMPT_TOKENS = 32
N_TEXT_TOKENS = 192
N_ROUNDS = 2
WIDTHS = range(1, N_VERIFY_ROWS + 1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, help="GGUF (default: the 64-expert demo model, sigma 0.2)")
    path = parser.parse_args(argv).model or ensure_demo_model(experts=64, used=8, sigma=0.2, progress=print)
    model = Model(
        Configure(
            model_path=str(path),
            n_ctx=1024,
            keep_expert_counts=False,
            prompt_cache_bytes=0,
            speculation=Speculation(method="s2moe"),
        ),
        lambda _phase, _fraction: None,
    )
    try:
        print(table(measure(model)))
    finally:
        model.close()
    return 0


def measure(model: Model) -> dict[int, float]:
    """Median seconds of a batch by its width."""
    text = "\n".join(message["content"] for message in prompts("summarise")[0])
    tokens = model.tokenize(text)[: N_PROMPT_TOKENS + N_TEXT_TOKENS]
    seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(N_ROUNDS):
        for width in WIDTHS:
            model.forget()
            model.decode(tokens[:N_PROMPT_TOKENS])
            batches = range(N_PROMPT_TOKENS, len(tokens) - width + 1, width)
            times = [evaluate(model, tokens[begin : begin + width], begin) for begin in batches]
            seconds[width] += times[1:]  # the first builds the graph
    model.forget()
    return {width: statistics.median(times) for width, times in seconds.items()}


def evaluate(model: Model, tokens: list[int], position: int) -> float:
    begun = time.perf_counter()
    model.library.decode(model.context, tokens, position, all_logits=True)
    return time.perf_counter() - begun


def table(seconds: dict[int, float]) -> str:
    """In Markdown: the batch, and what it is of as many single decodes."""
    lines = ["| tokens | milliseconds | of single decodes |", "| ---: | ---: | ---: |"]
    for width, each in seconds.items():
        lines.append(f"| {width} | {each * 1e3:.1f} | {each / (width * seconds[1]):.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
