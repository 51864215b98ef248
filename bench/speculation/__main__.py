"""Speculative decoding against plain decoding, under memory limits.

    .venv/bin/python -m s2moe.bench.speculation [--full] [--methods …] [--workloads …] [--limits …]

The whole server runs under bench/memlimit with the limit as its budget, an empty cache directory and the
64-expert demo model, greedy. Each method is paired with plain decoding (`off`) on the same prompt and the
same server, in turn; a pair's ratio is that of the seconds per token, prompts not counted. Tables have
geometric means and 95 % intervals (Student's t of the logarithms); then each goal is judged.

    exact, balanced, fast    the presets; budget-X is balanced with the error budget X
    expert-skip, cascade     baselines
    no-adaptive, no-single-token-bias, no-reuse-gating, no-shared-context    balanced less one component
    control                  off against off: the noise
    static                   balanced, experts in a fixed hot list instead of a cache (--static-hot-list)

The file --json is written after each cell; --resume continues it. Exits with 0, with --strict with 1 if a
goal was missed, with 2 after wrong usage. Needs an idle machine, and root for memory limits.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from s2moe.bench.offload import BUILD, describe_machine
from s2moe.bench.plotting import PlottingError, load_pyplot
from s2moe.bench.process import EXIT_NO_LIMIT, limited
from s2moe.bench.prompts import N_PROMPTS, WORKLOADS
from s2moe.bench.serving import Serving
from s2moe.bench.speculation.goals import judge
from s2moe.bench.speculation.grid import Grid, GridRun, StartServer
from s2moe.bench.speculation.hot_list import HotListError, write_hot_list
from s2moe.bench.speculation.methods import (
    BUDGETS,
    METHODS,
    OFF,
    SERVERS,
    STATIC,
    Method,
    MethodError,
    method_named,
)
from s2moe.bench.speculation.plots import draw_all
from s2moe.bench.speculation.quality_file import QualityFileError, read_agreement
from s2moe.bench.speculation.report import markdown
from s2moe.bench.speculation.results import Results, ResultsError, limit_bytes
from s2moe.bench.targets import MIB, Line
from s2moe.bench.workload import N_CTX
from s2moe.engine.cpu import default_thread_count
from s2moe.engine.demo_model import ensure_demo_model
from s2moe.engine.native import Library

DEFAULT_METHODS: Final = (OFF, "exact", "balanced")
DEFAULT_WORKLOADS: Final = ("qa", "code", "summarise")
DEFAULT_LIMITS: Final = (1050, 1500, 2100)
ALL_LIMITS: Final = (1050, 1500, 2100, 2800, None)
NOT_IN_FULL: Final = ("static", "control")
DEFAULT_N_PROMPTS: Final = 4
NO_LIMIT: Final = "none"


def main(argv: list[str] | None = None) -> int:
    parser = create_parser()
    arguments = parser.parse_args(argv)
    grid = create_grid(arguments, parser)
    try:
        agreement = read_agreement(arguments.quality)
        if arguments.plots is not None:
            load_pyplot()
        results = measure(grid, arguments, say_since(time.monotonic()))
    except (QualityFileError, ResultsError, PlottingError, HotListError) as error:
        parser.error(str(error))
    lines = judge(results, agreement)
    text = markdown(results, lines)
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(text)
    if arguments.plots is not None:
        for path in draw_all(results, agreement, arguments.plots):
            print(f"drawn: {path}", file=sys.stderr)
    return exit_status(lines, strict=arguments.strict)


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="speculation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF (default: the 64-expert demo model, sigma 0.2)")
    parser.add_argument("--methods", type=_words, metavar="A,B", help=f"default: {','.join(DEFAULT_METHODS)}")
    parser.add_argument(
        "--workloads",
        type=_words,
        metavar="A,B",
        help=f"default: {','.join(DEFAULT_WORKLOADS)}; there are {','.join(WORKLOADS)}",
    )
    parser.add_argument(
        "--limits",
        type=_limits,
        metavar="MIB,…",
        help=f"MiB or {NO_LIMIT}; default: {','.join(map(str, DEFAULT_LIMITS))}",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        metavar="N",
        help=f"of each workload, up to {N_PROMPTS}; default: {DEFAULT_N_PROMPTS}",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="all methods, workloads, limits and prompts, where none are given: hours",
    )
    parser.add_argument("--static-hot-list", action="store_true", help="the method static, too")
    parser.add_argument("--tokens", type=int, default=64, help="per answer")
    parser.add_argument("--threads", type=int, default=default_thread_count())
    parser.add_argument(
        "--json",
        type=Path,
        default=BUILD / "speculation.json",
        metavar="OUT",
        help="where the pairs are kept",
    )
    parser.add_argument("--resume", action="store_true", help="measure only what --json has not got yet")
    parser.add_argument(
        "--report-only", action="store_true", help="measure nothing; tables and plots of what --json has"
    )
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="where to write the tables")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="where to draw; needs matplotlib")
    parser.add_argument(
        "--quality",
        type=Path,
        nargs="+",
        default=[],
        metavar="JSON",
        help="files of `s2moe quality --json`, one for each limit",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal was missed")
    return parser


def create_grid(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Grid:
    """What the flags ask for; wrong ones end the process."""
    full = arguments.full
    all_methods = (*(name for name in METHODS if name not in NOT_IN_FULL), *BUDGETS)
    names = list(arguments.methods or (all_methods if full else DEFAULT_METHODS))
    if arguments.static_hot_list and "static" not in names:
        names.append("static")
    workloads = arguments.workloads or (WORKLOADS if full else DEFAULT_WORKLOADS)
    n_prompts = arguments.prompts
    if n_prompts is None:
        n_prompts = N_PROMPTS if full else DEFAULT_N_PROMPTS
    for workload in workloads:
        if workload not in WORKLOADS:
            parser.error(f"--workloads: {workload!r} is none; choose from {','.join(WORKLOADS)}")
    if not 1 <= n_prompts <= N_PROMPTS:
        parser.error(f"--prompts: {n_prompts} is not from 1 to {N_PROMPTS}")
    if arguments.tokens < 2:
        parser.error("--tokens: at least 2, since the first token of an answer is not timed")
    methods: list[Method] = []
    try:
        # off is the other half of every pair
        methods = [method_named(name) for name in names if name != OFF]
    except MethodError as error:
        parser.error(f"--methods: {error}")
    if not methods:
        parser.error("--methods: nothing to compare with off; `control` is off against itself")
    return Grid(
        methods=tuple(methods),
        workloads=tuple(workloads),
        limits=tuple(arguments.limits or (ALL_LIMITS if full else DEFAULT_LIMITS)),
        n_prompts=n_prompts,
        n_tokens=arguments.tokens,
    )


def measure(grid: Grid, arguments: argparse.Namespace, say: Callable[[str], None]) -> Results:
    """Raises ResultsError and HotListError."""
    out: Path = arguments.json
    if arguments.report_only:
        return Results.load(out)
    model = arguments.model or ensure_demo_model(experts=64, used=8, sigma=0.2, progress=say)
    facts = describe(model, arguments)
    results = open_results(out, facts, resume=arguments.resume, say=say)
    check_servers(grid)
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="speculation-", dir=BUILD) as name:
        work = Path(name)
        check_limits(grid, work)
        minutes = grid.expected_seconds(results) / 60
        what = f"{grid.pending(results)} pairs of {grid.n_tokens} tokens"
        say(f"{what}, about {minutes:.0f} min; written to {out}")
        hot_list = None
        if STATIC in grid.servers:
            hot_list = write_hot_list(
                model,
                work,
                workloads=grid.workloads,
                n_prompts=grid.n_prompts,
                n_tokens=grid.n_tokens,
                say=say,
            )
        run = GridRun(
            grid,
            results,
            start_server=server_starter(model, work, arguments.threads, hot_list),
            save=lambda: results.save(out),
            say=say,
        )
        try:
            run.run()
        except KeyboardInterrupt:
            say("interrupted; --resume continues")
    return results


def open_results(out: Path, facts: dict[str, Any], *, resume: bool, say: Callable[[str], None]) -> Results:
    """Raises ResultsError."""
    if resume and out.exists():
        return Results.resume(out, facts)
    if out.exists():
        aside = out.with_suffix(".previous" + out.suffix)
        out.replace(aside)
        say(f"moved the results of an earlier run to {aside}; --resume would have continued it")
    return Results(facts)


def server_starter(model: Path, work: Path, n_threads: int, hot_list: Path | None = None) -> StartServer:
    """`hot_list`: for the server STATIC."""

    def start(limit_mib: int | None, server: str) -> Serving:
        folder = work / "server"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        flags = ["--ctx-size", str(N_CTX), "--threads", str(n_threads), *SERVERS[server]]
        if server == STATIC and hot_list is not None:
            flags += ["--hot-experts", str(hot_list)]
        if limit_mib is not None:
            flags += ["--memory-budget", str(limit_mib * MIB)]
        # no prompt comes twice: it would only take slots from the experts
        flags += ["--prompt-cache-size", "0"]
        return Serving(
            model, folder, *flags, cache_directory=folder / "cache", limit_bytes=limit_bytes(limit_mib)
        )

    return start


def check_servers(grid: Grid) -> None:
    """Exits where the server does not know a flag that a method needs."""
    wanted = {server: SERVERS[server][0] for server in grid.servers if SERVERS[server]}
    if not wanted:
        return
    command = [str(Path(sys.executable).with_name("s2moe")), "serve", "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for server, flag in wanted.items():
        if flag not in known:
            methods = ",".join(method.name for method in grid.methods if method.server == server)
            sys.exit(f"speculation: error: {methods}: not available: this server has no {flag}; leave it out")


def check_limits(grid: Grid, work: Path) -> None:
    """Exits where memory limits cannot be set."""
    if set(grid.limits) == {None}:
        return
    probe = subprocess.run(
        limited(["true"], 64 * MIB, work / "probe.json"), capture_output=True, text=True, check=False
    )
    if probe.returncode == EXIT_NO_LIMIT:
        sys.exit(f"speculation: error: {probe.stderr.strip()}; or choose --limits {NO_LIMIT}")


def describe(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    machine = describe_machine()
    machine.pop("load_average")  # another one at each start
    return {
        "version": version("s2moe"),
        "build": Library().describe_build(),
        "machine": machine,
        "model": {"name": model.name, "bytes": model.stat().st_size},
        "n_tokens": arguments.tokens,
        "n_threads": arguments.threads,
    }


def exit_status(lines: list[Line], *, strict: bool) -> int:
    return int(strict and any(line.passed is False for line in lines))


def say_since(started: float) -> Callable[[str], None]:
    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.0f} s] {line}", file=sys.stderr, flush=True)

    return say


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word for word in text.split(",") if word))


def _limits(text: str) -> list[int | None]:
    try:
        limits = [None if word == NO_LIMIT else int(word) for word in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"write MiB or {NO_LIMIT}, separated by commas") from None
    if not limits or any(limit is not None and limit <= 0 for limit in limits):
        raise argparse.ArgumentTypeError("a limit is above 0")
    return limits


if __name__ == "__main__":
    sys.exit(main())
