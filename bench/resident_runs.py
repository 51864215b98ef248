"""Without a limit, every expert in a slot: decode and prefill against stock llama.cpp, and with company."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from s2moe.bench.answer import Answer
from s2moe.bench.offload_context import Context, overhead_bytes, spread
from s2moe.bench.serving import PLAIN_DECODING, Samples, Serving
from s2moe.bench.stock import StockLlama
from s2moe.bench.targets import (
    CONTENTION_SHARE,
    MIB,
    OVERHEAD_BYTES,
    RESIDENT_DECODE_RATIO,
    RESIDENT_PREFILL_RATIO,
    Line,
    at_least,
    at_most,
)
from s2moe.bench.workload import N_CTX, Messages, long_prompt, questions

MAX_FILLING_PROMPTS = 6


class Pairs:
    """Our server and stock llama.cpp, asked in turn; whoever goes first changes, so that a drifting machine
    favours neither."""

    def __init__(self, serving: Serving, stock: StockLlama) -> None:
        self._serving = serving
        self._stock = stock
        self._ours_first = False

    def ask(self, messages: Messages, n_tokens: int) -> tuple[Answer, Answer]:
        """Our answer and stock's."""
        self._ours_first = not self._ours_first
        if self._ours_first:
            ours = self._serving.chat(messages, n_tokens)
            return ours, self._stock.chat(messages, n_tokens)
        stock = self._stock.chat(messages, n_tokens)
        return self._serving.chat(messages, n_tokens), stock


def measure_resident(context: Context, sections: set[str]) -> None:
    """The sections `resident` and `contention`."""
    folder = context.new_folder("resident")
    flags = ["--ctx-size", str(N_CTX), "--threads", str(context.n_threads), *PLAIN_DECODING]
    serving = Serving(context.model, folder, *flags, cache_directory=folder / "cache")
    try:
        stock = StockLlama(context.model, folder, n_threads=context.n_threads, n_ctx=N_CTX)
        try:
            pairs = Pairs(serving, stock)
            fill(context, serving)
            pairs.ask(questions()[0], context.n_tokens)
            if "resident" in sections:
                compare_prefill(context, pairs)
                compare_decode(context, pairs)
                judge_memory(context, serving)
            if "contention" in sections:
                compare_contention(context, pairs)
        finally:
            stock.close()
    finally:
        serving.close()


def fill(context: Context, serving: Serving) -> None:
    """Prompts until every expert is in its slot."""
    for _ in range(MAX_FILLING_PROMPTS):
        serving.chat(long_prompt(context.next_number()), 1)
        if absent_experts(serving.metrics()) == 0:
            break
    absent = absent_experts(serving.metrics())
    context.results["resident_absent_experts"] = absent
    context.lines.append(at_most("resident", "slots still empty after the warm-up", absent, 0))


def absent_experts(samples: Samples) -> float:
    capacity = samples.sum("s2moe_expert_cache_capacity_experts")
    return capacity - samples.sum("s2moe_expert_cache_resident_experts")


def compare_prefill(context: Context, pairs: Pairs) -> None:
    ratios, ours_seconds, n_tokens = [], [], 0
    for _ in range(context.n_repeats):
        ours, stock = pairs.ask(long_prompt(context.next_number()), 1)
        ratios.append(stock.first_token_seconds / ours.first_token_seconds)
        ours_seconds.append(ours.first_token_seconds)
        n_tokens = ours.n_prompt_tokens
        context.say(f"resident prefill: {ours_seconds[-1]:.2f} s, {ratios[-1]:.3f} × stock's speed")
    context.results["resident_prefill"] = {"ratios": ratios, "seconds": ours_seconds, "n_tokens": n_tokens}
    median = statistics.median(ratios)
    context.lines += [
        at_least("resident", "speed of prefill / stock", median, RESIDENT_PREFILL_RATIO, " ×"),
        Line("resident", f"prefill of {n_tokens} tokens", f"{spread(ours_seconds)} s"),
    ]


def compare_decode(context: Context, pairs: Pairs) -> None:
    speeds = decode_pairs(context, pairs, "resident decode")
    context.results["resident_decode"] = {"pairs": speeds}
    ratios = [ours / stock for ours, stock in speeds]
    context.lines += [
        at_least(
            "resident",
            "speed of decode / stock, default flags",
            statistics.median(ratios),
            RESIDENT_DECODE_RATIO,
            " ×",
        ),
        Line("resident", "ratios of the pairs", f"{spread(ratios)} ×"),
        Line("resident", "decode", f"{spread([ours for ours, _ in speeds])} tok/s"),
        Line("resident", "decode, stock llama.cpp", f"{spread([stock for _, stock in speeds])} tok/s"),
    ]


def decode_pairs(context: Context, pairs: Pairs, what: str) -> list[tuple[float, float]]:
    """Speeds of both for each repeat, the questions in turn."""
    speeds = []
    for repeat in range(context.n_repeats):
        asked = questions()
        ours, stock = pairs.ask(asked[repeat % len(asked)], context.n_tokens)
        speeds.append((ours.tokens_per_second, stock.tokens_per_second))
        context.say(f"{what}: {speeds[-1][0]:.2f} tok/s, stock {speeds[-1][1]:.2f} tok/s")
    return speeds


def judge_memory(context: Context, serving: Serving) -> None:
    """A second copy of the weights would be far above what the processes may cost."""
    peak_rss = serving.peak_rss_bytes()
    overhead = overhead_bytes(peak_rss, serving.metrics())
    context.results["resident_memory"] = {"peak_rss": peak_rss, "overhead_bytes": overhead}
    what = "processes beside weights, KV, buffers, slots"
    context.lines.append(at_most("resident", what, overhead / MIB, OVERHEAD_BYTES / MIB, " MiB"))


def compare_contention(context: Context, pairs: Pairs) -> None:
    alone = decode_pairs(context, pairs, "alone")
    with busy_process():
        beside = decode_pairs(context, pairs, "beside a busy process")
    shares: list[Any] = [
        statistics.median(pair[who] for pair in beside) / statistics.median(pair[who] for pair in alone)
        for who in (0, 1)
    ]
    context.results["contention"] = {"alone": alone, "beside": beside, "shares": shares}
    context.lines += [
        at_least("contention", "speed kept beside a busy process", shares[0], CONTENTION_SHARE, " ×"),
        Line("contention", "the same, stock llama.cpp", f"{shares[1]:.3g} ×"),
    ]


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """One process that never waits."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
