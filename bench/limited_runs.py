"""Under a memory limit: decode and prefill of the whole server, and stock llama.cpp beside it."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from s2moe.bench.answer import Answer, bytes_per_token, tokens_per_second
from s2moe.bench.expert_bound import RunTrace, analyse, read_trace
from s2moe.bench.offload_context import Context, overhead_bytes, spread
from s2moe.bench.process import LimitReport
from s2moe.bench.serving import PLAIN_DECODING, Serving
from s2moe.bench.stock import StockError, StockLlama
from s2moe.bench.targets import (
    BOUND_SHARE,
    GIB,
    MIB,
    OVERHEAD_BYTES,
    PEER_DRIVE_BYTES_PER_SECOND,
    PEERS,
    PREFILL_DRIVE_SHARE,
    Line,
    at_least,
    at_most,
)
from s2moe.bench.workload import N_CTX, long_prompt, questions

LOAD_BYTES = "s2moe_expert_cache_load_bytes_total"
READ_SECONDS = "s2moe_expert_cache_read_seconds_total"
N_STOCK_QUESTIONS = 2


@dataclass(frozen=True)
class Run:
    """One server from its start to its end."""

    drive_bytes_per_second: float
    """Mean of a measurement before and one after."""
    start_seconds: float
    start_read_bytes: int
    tokens_per_second: float
    bytes_per_token: float
    """As the kernel counted them for the engine, between the first and the last token."""
    server_bytes_per_token: float
    """As the answers' `timings` say."""
    metrics_share: float
    """Bytes of /metrics over bytes of the kernel, from ready to the last token, prompts included."""
    trace: RunTrace
    peak_rss: dict[str, int]
    overhead_bytes: int
    limit: LimitReport
    texts: list[str]
    n_tokens: list[int]


def server_flags(context: Context, limit_bytes: int) -> list[str]:
    flags = ["--memory-budget", str(limit_bytes), "--ctx-size", str(N_CTX)]
    return [*flags, "--threads", str(context.n_threads), *PLAIN_DECODING]


def run_decode(context: Context, limit_bytes: int, folder: Path) -> Run:
    """Four answers of a server whose cache directory is `folder`/cache, as it is found."""
    trace_path = folder / "trace.jsonl"
    before = context.measure_drive()
    serving = Serving(
        context.model,
        folder,
        *server_flags(context, limit_bytes),
        "--expert-trace",
        str(trace_path),
        cache_directory=folder / "cache",
        limit_bytes=limit_bytes,
        read_limit=context.drive.read_limit,
    )
    try:
        loaded = serving.metrics().sum(LOAD_BYTES, source="disk")
        answers = [serving.chat(messages, context.n_tokens) for messages in questions()]
        samples = serving.metrics()
        serving.chat(long_prompt(context.next_number()), 1)  # only that touches the whole of the buffers
        peak_rss = serving.peak_rss_bytes()
        overhead = overhead_bytes(peak_rss, serving.metrics())
    finally:
        report = serving.close()
    assert report is not None
    drive = (before + context.measure_drive()) / 2
    kernel_bytes = answers[-1].last_read_bytes - serving.start_read_bytes
    return Run(
        drive_bytes_per_second=drive,
        start_seconds=serving.start_seconds,
        start_read_bytes=serving.start_read_bytes,
        tokens_per_second=tokens_per_second(answers),
        bytes_per_token=bytes_per_token(answers),
        server_bytes_per_token=server_bytes_per_token(answers),
        metrics_share=(samples.sum(LOAD_BYTES, source="disk") - loaded) / max(1, kernel_bytes),
        trace=analyse(list(read_trace(trace_path)), answers, drive),
        peak_rss=peak_rss,
        overhead_bytes=overhead,
        limit=report,
        texts=[answer.text for answer in answers],
        n_tokens=[answer.n_tokens for answer in answers],
    )


def server_bytes_per_token(answers: list[Answer]) -> float:
    n_bytes = sum(answer.timings["predicted_expert_read_bytes"] for answer in answers)
    return n_bytes / sum(answer.n_intervals for answer in answers)


def measure_decode(context: Context, limits: list[int]) -> None:
    """The section `offload`."""
    texts: dict[str, list[str]] = {}
    for limit_bytes in limits:
        name = f"{limit_bytes / MIB:.0f} MiB"
        runs = []
        for repeat in range(context.n_repeats):
            # empties the cache directory: nothing is known of earlier runs
            folder = context.new_folder(f"decode-{limit_bytes // MIB}")
            runs.append(run_decode(context, limit_bytes, folder))
            speed, drive = runs[-1].tokens_per_second, runs[-1].drive_bytes_per_second
            context.say(f"{name}, run {repeat + 1}: {speed:.2f} tok/s, drive {drive / GIB:.2f} GiB/s")
        warm = run_decode(context, limit_bytes, folder)
        context.say(f"{name}, warm start: {warm.tokens_per_second:.2f} tok/s")
        texts[name] = runs[0].texts
        result: dict[str, Any] = {"runs": [asdict(run) for run in runs], "warm_start": asdict(warm)}
        context.results.setdefault("offload", {})[str(limit_bytes)] = result
        context.lines += [*judge(name, limit_bytes, runs), *describe(name, runs, warm)]
        if context.n_stock_tokens:
            result["stock"] = stock = run_stock(context, limit_bytes)
            context.lines.append(compare(name, runs, stock))
    same = len({tuple(each) for each in texts.values()}) == 1
    context.results["offload_texts"] = texts
    context.lines.append(Line("offload", "text under every limit", "the same" if same else "differs"))


def run_stock(context: Context, limit_bytes: int) -> dict[str, Any]:
    """Few tokens: page faults make each take seconds."""
    folder = context.new_folder(f"stock-{limit_bytes // MIB}")
    stock = StockLlama(
        context.model,
        folder,
        n_threads=context.n_threads,
        n_ctx=N_CTX,
        limit_bytes=limit_bytes,
        read_limit=context.drive.read_limit,
    )
    try:
        conversations = questions(N_STOCK_QUESTIONS)
        answers = [stock.chat(messages, context.n_stock_tokens) for messages in conversations]
    except StockError as error:
        context.say(f"{limit_bytes / MIB:.0f} MiB: {error}")
        return {"error": str(error)}
    finally:
        report = stock.close()
    speed = tokens_per_second(answers)
    context.say(f"{limit_bytes / MIB:.0f} MiB, stock llama.cpp: {speed:.2f} tok/s")
    return {
        "tokens_per_second": speed,
        "bytes_per_token": bytes_per_token(answers),
        "limit": None if report is None else asdict(report),
    }


def judge(name: str, limit_bytes: int, runs: list[Run]) -> list[Line]:
    """The lines that can fail."""
    median = statistics.median
    lines = []
    peer = PEERS.get(limit_bytes)
    if peer is not None:
        ratios = [
            run.tokens_per_second
            / (peer.tokens_per_second * run.drive_bytes_per_second / PEER_DRIVE_BYTES_PER_SECOND)
            for run in runs
        ]
        what = "speed / peer scaled by the drive"
        lines.append(at_least(name, what, median(ratios), peer.required_ratio, " ×"))
        what = "bytes per token (kernel)"
        n_mib = median(run.bytes_per_token for run in runs) / MIB
        lines.append(at_most(name, what, n_mib, peer.bytes_per_token / MIB, " MiB"))
    share = median(run.trace.bound_share for run in runs)
    lines.append(at_least(name, "speed / the run's own bound", share, BOUND_SHARE, " ×"))
    overhead = max(run.overhead_bytes for run in runs)
    what = "processes beside weights, KV, buffers, slots"
    lines.append(at_most(name, what, overhead / MIB, OVERHEAD_BYTES / MIB, " MiB"))
    rss = max(sum(run.peak_rss.values()) for run in runs)
    lines.append(at_most(name, "peak RSS of both processes", rss / MIB, limit_bytes / MIB, " MiB"))
    kills = sum(run.limit.oom_kills or 0 for run in runs)
    lines.append(at_most(name, "processes killed for want of memory", kills, 0))
    return lines


def describe(name: str, runs: list[Run], warm: Run) -> list[Line]:
    """The lines that only tell."""

    def of(values: list[float], unit: str) -> str:
        return f"{spread(values)} {unit}"

    traces = [run.trace for run in runs]
    parts = [
        ("dense", [trace.dense_seconds for trace in traces]),
        ("expert compute", [trace.compute_seconds for trace in traces]),
        ("stalled", [trace.stall_seconds for trace in traces]),
        ("between decodes", [trace.between_seconds for trace in traces]),
    ]
    pairs = [
        ("speed", of([run.tokens_per_second for run in runs], "tok/s")),
        ("bound of the run", of([trace.bound_tokens_per_second for trace in traces], "tok/s")),
        ("drive", of([run.drive_bytes_per_second / GIB for run in runs], "GiB/s")),
        ("hits", of([100 * trace.hit_ratio for trace in traces], "%")),
        *((f"per token: {what}", of([1e3 * value for value in values], "ms")) for what, values in parts),
        ("bytes per token (answers)", of([run.server_bytes_per_token / MIB for run in runs], "MiB")),
        ("bytes per token (trace)", of([trace.bytes_per_token / MIB for trace in traces], "MiB")),
        ("bytes of /metrics / of the kernel", of([run.metrics_share for run in runs], "×")),
        ("read until ready", of([run.start_read_bytes / MIB for run in runs], "MiB")),
        ("time until ready", of([run.start_seconds for run in runs], "s")),
        ("peak charge", of([(run.limit.peak_bytes or 0) / MIB for run in runs], "MiB")),
        ("warm start: speed", f"{warm.tokens_per_second:.4g} tok/s"),
        ("warm start: bytes per token", f"{warm.bytes_per_token / MIB:.4g} MiB"),
    ]
    return [Line(name, what, measured) for what, measured in pairs]


def compare(name: str, runs: list[Run], stock: dict[str, Any]) -> Line:
    what = "stock llama.cpp, mmap"
    if "error" in stock:
        return Line(name, what, stock["error"].splitlines()[0])
    ratio = statistics.median(run.tokens_per_second for run in runs) / stock["tokens_per_second"]
    return Line(name, what, f"{stock['tokens_per_second']:.3g} tok/s (s2moe: {ratio:.3g} ×)")


def measure_prefill(context: Context, limits: list[int]) -> None:
    """The section `prefill`: a prompt of 512 tokens into an empty cache."""
    for limit_bytes in limits:
        name = f"prefill, {limit_bytes / MIB:.0f} MiB"
        runs = [run_prefill(context, limit_bytes) for _ in range(context.n_repeats)]
        context.results.setdefault("prefill", {})[str(limit_bytes)] = runs
        shares = [run["bytes"] / run["seconds"] / run["drive_bytes_per_second"] for run in runs]
        reading = [run["bytes"] / run["read_seconds"] / run["drive_bytes_per_second"] for run in runs]
        context.say(f"{name}: {spread([run['seconds'] for run in runs])} s, {spread(shares)} of the drive")
        context.lines += [
            at_least(
                name, "bytes per second / the drive's", statistics.median(shares), PREFILL_DRIVE_SHARE, " ×"
            ),
            Line(name, "the same while a read is in flight", f"{spread(reading)} ×"),
            Line(name, "time", f"{spread([run['seconds'] for run in runs])} s"),
            Line(name, "prompt", f"{runs[0]['n_tokens']} tokens"),
            Line(name, "read", f"{spread([run['bytes'] / MIB for run in runs])} MiB"),
        ]


def run_prefill(context: Context, limit_bytes: int) -> dict[str, float]:
    folder = context.new_folder(f"prefill-{limit_bytes // MIB}")
    before = context.measure_drive()
    flags = server_flags(context, limit_bytes)
    serving = Serving(
        context.model,
        folder,
        *flags,
        cache_directory=folder / "cache",
        limit_bytes=limit_bytes,
        read_limit=context.drive.read_limit,
    )
    try:
        read_seconds = serving.metrics().sum(READ_SECONDS)
        answer = serving.chat(long_prompt(context.next_number()), 1)
        read_seconds = serving.metrics().sum(READ_SECONDS) - read_seconds
    finally:
        serving.close()
    return {
        "n_tokens": answer.n_prompt_tokens,
        "seconds": answer.timings["prompt_ms"] / 1e3,
        "bytes": answer.prefill_bytes,
        "read_seconds": read_seconds,
        "drive_bytes_per_second": (before + context.measure_drive()) / 2,
    }
