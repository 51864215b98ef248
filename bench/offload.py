"""How fast a model decodes that does not fit its memory, against its targets and against stock llama.cpp.

    .venv/bin/python -m s2moe.bench.offload [--sections offload,prefill,resident,contention] [--quick]

The whole server (`s2moe serve --memory-budget LIMIT`, front end and engine) runs under bench/memlimit
with the limit as its budget, page cache dropped, an empty cache directory, greedy, speculation off, one
user; a streaming client asks four questions of different subjects. Speed and bytes count from an answer's
first to its last token.

    offload     decode under each limit: speed against BigMoeOnEdge's, scaled by the drive's bandwidth
                (measured before and after each run), and against the run's own bound; bytes per token;
                memory; a warm start and stock llama.cpp (mmap, same limit) beside it
    prefill     a prompt of 512 tokens under each limit, cache empty: bytes per second against the drive's
    resident    no limit, every expert in a slot: decode and prefill against stock llama.cpp, in turn
    contention  the same decode beside a process that is always busy

Prints a line for each number with its target, writes everything as JSON, and exits with 1 when a target was
missed. Needs an idle machine, and root for the memory limit. --drive-limit makes a drive of known speed out
of a faster one, for offload and prefill: servers, stock llama.cpp and the measurement of the drive alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from s2moe.bench.drive import Drive, DriveError
from s2moe.bench.limited_runs import measure_decode, measure_prefill
from s2moe.bench.offload_context import Context, spread
from s2moe.bench.process import EXIT_NO_LIMIT, ReadLimit, limited
from s2moe.bench.resident_runs import measure_resident
from s2moe.bench.serving import ServingError
from s2moe.bench.stock import StockError, build_stock
from s2moe.bench.targets import GIB, MIB, PEERS, Line, table
from s2moe.engine.cpu import default_thread_count
from s2moe.engine.demo_model import ensure_demo_model
from s2moe.engine.native import Library
from s2moe.engine.native_experts import model_layout
from s2moe.server.settings import parse_size_bytes

SECTIONS = ("offload", "prefill", "resident", "contention")
LIMITED = {"offload", "prefill"}
LIMIT_REACHED = 0.95
"""A measurement below this share of --drive-limit is the drive's own speed."""
BUILD = Path(__file__).resolve().parents[1] / "build" / "bench"


def main() -> int:
    arguments = parse_arguments()
    model = arguments.model or ensure_demo_model(experts=64, used=8, sigma=0.2, progress=print)
    n_repeats = 1 if arguments.quick else arguments.repeats
    read_limit = None if arguments.drive_limit is None else ReadLimit(arguments.drive_limit, model)
    started = time.monotonic()
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="offload-", dir=BUILD) as work:
        if LIMITED & arguments.sections:
            check_limit(Path(work), read_limit)
        if {"resident", "contention"} & arguments.sections or arguments.stock_tokens:
            build_stock()
        layer = model_layout(Library(), model)["layers"][0]
        context = Context(
            model=model,
            work=Path(work),
            drive=Drive(model, layer["expert_bytes"], read_limit=read_limit),
            n_threads=arguments.threads,
            n_tokens=arguments.tokens,
            n_stock_tokens=arguments.stock_tokens,
            n_repeats=n_repeats,
            say=lambda line: print(f"[{time.monotonic() - started:6.0f} s] {line}", flush=True),
        )
        try:
            measure(context, arguments.sections, arguments.limits)
        except (ServingError, StockError, DriveError) as error:
            context.say(f"error: {error}")
            context.lines.append(Line("error", str(error).splitlines()[0], "", "", passed=False))
        except KeyboardInterrupt:
            context.lines.append(Line("error", "interrupted", "", "", passed=False))
    speeds = [speed.bytes_per_second / GIB for speed in context.drive_speeds]
    if speeds:
        context.lines.append(Line("drive", "every measurement", f"{spread(speeds)} GiB/s"))
    if read_limit is not None:
        print("\n" + drive_header(read_limit, speeds))
    print("\n" + table(context.lines))
    write_json(arguments.json, context, arguments)
    print(f"\nwritten to {arguments.json}")
    return int(any(line.passed is False for line in context.lines))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF (default: the 64-expert demo model, sigma 0.2)")
    parser.add_argument("--sections", type=sections_of, default=set(SECTIONS), help=",".join(SECTIONS))
    parser.add_argument(
        "--limits", type=limits_of, default=list(PEERS), help="MiB, separated by commas (1050,1500,2100,2800)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs that a median is taken of")
    parser.add_argument("--quick", action="store_true", help="one run instead")
    parser.add_argument("--tokens", type=int, default=96, help="per answer")
    parser.add_argument(
        "--stock-tokens", type=int, default=8, help="per answer of stock llama.cpp under a limit; 0 = none"
    )
    parser.add_argument("--threads", type=int, default=default_thread_count())
    parser.add_argument(
        "--drive-limit",
        type=rate_of,
        metavar="BYTES_PER_SECOND",
        help="of reads, such as 1GiB (default: none)",
    )
    parser.add_argument(
        "--json", type=Path, default=BUILD / "offload.json", help="where to write the results"
    )
    arguments = parser.parse_args()
    if arguments.repeats < 1 or arguments.tokens < 2 or arguments.stock_tokens == 1:
        parser.error("--repeats is at least 1, --tokens at least 2, --stock-tokens 0 or at least 2")
    if arguments.drive_limit is not None and not LIMITED & arguments.sections:
        parser.error("--drive-limit is for the sections offload and prefill")
    return arguments


def sections_of(text: str) -> set[str]:
    chosen = set(text.split(","))
    if not chosen <= set(SECTIONS):
        raise argparse.ArgumentTypeError(f"choose from {','.join(SECTIONS)}")
    return chosen


def limits_of(text: str) -> list[int]:
    try:
        return [int(number) * MIB for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError("write MiB, separated by commas") from None


def rate_of(text: str) -> int:
    try:
        rate = parse_size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not isinstance(rate, int) or rate == 0:
        raise argparse.ArgumentTypeError("the limit must not be 0")
    return rate


def check_limit(work: Path, read_limit: ReadLimit | None) -> None:
    """Exits before anything is measured where a limit cannot be set."""
    probe = subprocess.run(
        limited(["true"], 64 * MIB, work / "probe.json", read_limit=read_limit),
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode == EXIT_NO_LIMIT:
        remedy = "choose --sections resident,contention"
        if read_limit is not None:
            remedy = f"leave out --drive-limit, or {remedy}"
        sys.exit(f"offload: error: {probe.stderr.strip()}; or {remedy}")


def drive_header(read_limit: ReadLimit, speeds: list[float]) -> str:
    """What a reader of the table must know of its drive; `speeds`: the measurements, in GiB/s."""
    rate = read_limit.bytes_per_second / GIB
    header = (
        f"drive in offload and prefill: throttled to {rate:.4g} GiB/s (--drive-limit); "
        "bursts within about 0.1 s go above it"
    )
    if speeds and min(speeds) < LIMIT_REACHED * rate:
        header += (
            f"\nwarning: the drive is not always that fast ({min(speeds):.4g} GiB/s at the slowest), "
            "so what is scaled by it is not fair; choose a lower limit"
        )
    return header


def measure(context: Context, sections: set[str], limits: list[int]) -> None:
    if "offload" in sections:
        measure_decode(context, limits)
    if "prefill" in sections:
        measure_prefill(context, limits)
    if {"resident", "contention"} & sections:
        measure_resident(context, sections)


def write_json(path: Path, context: Context, arguments: argparse.Namespace) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "version": version("s2moe"),
        "build": Library().describe_build(),
        "machine": describe_machine(),
        "model": {"name": context.model.name, "bytes": context.model.stat().st_size},
        "arguments": {
            "sections": sorted(arguments.sections),
            "repeats": context.n_repeats,
            "tokens": context.n_tokens,
            "threads": context.n_threads,
            "drive_limit_bytes_per_second": arguments.drive_limit,
        },
        "drive": [asdict(speed) for speed in context.drive_speeds],
        "results": context.results,
        "lines": [asdict(line) for line in context.lines],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def describe_machine() -> dict[str, Any]:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.machine(),
        "n_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
