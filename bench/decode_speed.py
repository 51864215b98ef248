"""Decode speed through HTTP against stock llama.cpp in the same run.

    .venv/bin/python -m s2moe.bench.decode_speed [--model PATH] [--tokens 128] [--rounds 7]

The opponent is llama-cpp-python's own `Llama` on an unpatched libllama with its released flags (built here
when missing), in a process of its own; ours is `s2moe serve` read by an HTTP client. Same file, same threads,
same greedy text. Requests alternate; speed is tokens per second between the first and the last token. Prints
medians and the ratio of each pair. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from s2moe.bench.serving import PLAIN_DECODING, Serving
from s2moe.bench.stock import StockLlama, build_stock
from s2moe.engine.cpu import default_thread_count
from s2moe.engine.demo_model import ensure_demo_model

SYSTEM = "You are a helpful assistant."
PROMPT = "Tell me a long story about a river and the people who live beside it."
N_CTX = 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF (default: the 16-expert demo model)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=default_thread_count())
    arguments = parser.parse_args()
    model = arguments.model or ensure_demo_model(progress=print)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
    build_stock()
    with tempfile.TemporaryDirectory() as name:
        pairs = measure(model, Path(name), messages, arguments)
    ratios = [a / b for a, b in pairs]
    print(
        f"median: ours {statistics.median(a for a, _ in pairs):.2f} tok/s, stock llama.cpp "
        f"{statistics.median(b for _, b in pairs):.2f} tok/s, ratio {statistics.median(ratios):.3f} "
        f"(of pairs {min(ratios):.3f} to {max(ratios):.3f}), {arguments.threads} threads"
    )


def measure(
    model: Path, work: Path, messages: list[dict[str, str]], arguments: argparse.Namespace
) -> list[tuple[float, float]]:
    """Tokens per second of ours and of stock llama.cpp, a pair for each round."""
    n_threads, n_tokens = arguments.threads, arguments.tokens
    stock = StockLlama(model, work, n_threads=n_threads, n_ctx=N_CTX)
    try:
        flags = ["--threads", str(n_threads), "--ctx-size", str(N_CTX), *PLAIN_DECODING]
        ours = Serving(model, work, *flags, cache_directory=work / "cache")
        try:
            stock.chat(messages, n_tokens)
            ours.chat(messages, n_tokens)
            pairs = []
            for round_ in range(arguments.rounds):
                # whoever goes first changes, so that a drifting machine favours neither
                order = (stock, ours) if round_ % 2 == 0 else (ours, stock)
                answers = {runner: runner.chat(messages, n_tokens) for runner in order}
                pairs.append((answers[ours].tokens_per_second, answers[stock].tokens_per_second))
                same = "same text" if answers[ours].text == answers[stock].text else "other text"
                print(f"  ours {pairs[-1][0]:6.2f} tok/s   stock {pairs[-1][1]:6.2f} tok/s   {same}")
            return pairs
        finally:
            ours.close()
    finally:
        stock.close()


if __name__ == "__main__":
    main()
