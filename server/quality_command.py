"""The command `s2moe quality`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from s2moe.server.argument_types import budget, positive
from s2moe.server.settings import AUTO_BUDGET

PRESETS: Final = ("exact", "balanced", "fast")
DEFAULT_TOKENS: Final = 2048
DEFAULT_WINDOW: Final = 256
LEAST_WINDOW: Final = 32


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "quality",
        help="measure what reuse gating costs in quality",
        description="Go along a text as the server would decode it, with real drafts, and compare the gated "
        "predictions with the exact ones: KL divergence, probabilities, most probable token, perplexity. "
        "docs/quality.md says what the figures mean.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="GGUF file with experts")
    parser.add_argument("--text", type=Path, required=True, metavar="PATH", help="UTF-8 text")
    parser.add_argument(
        "--preset",
        type=_presets,
        default=PRESETS,
        metavar="NAMES",
        help=f"presets to compare, separated by commas (default {','.join(PRESETS)})",
    )
    parser.add_argument(
        "--budgets",
        type=_budgets,
        default=(),
        metavar="SHARES",
        help="error budgets to compare beside them, such as 0.02,0.05,0.1, in place of that of `balanced`",
    )
    parser.add_argument(
        "--memory-budget",
        type=budget,
        default=AUTO_BUDGET,
        metavar="SIZE",
        help="what `s2moe serve` would get, in bytes or as 1500MiB (default: what there is, less a reserve)",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=DEFAULT_TOKENS,
        metavar="N",
        help=f"tokens of the text, at most (default {DEFAULT_TOKENS})",
    )
    parser.add_argument(
        "--window",
        type=_window,
        default=DEFAULT_WINDOW,
        metavar="N",
        help="tokens that are evaluated behind each other; the first eighth is the prompt "
        f"(default {DEFAULT_WINDOW})",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the figures as JSON")


def run(arguments: dict[str, Any], progress: Callable[[str], None]) -> int:
    """Raises s2moe.engine.quality.QualityError."""
    from s2moe.engine.quality import Task, quality, settings_of

    out = arguments["json"]
    task = Task(
        model_path=arguments["model"].expanduser(),
        text_path=arguments["text"].expanduser(),
        settings=settings_of(arguments["preset"], arguments["budgets"]),
        memory_budget_bytes=arguments["memory_budget"],
        n_tokens=arguments["tokens"],
        window_tokens=arguments["window"],
        out=None if out is None else out.expanduser(),
    )
    print("\n".join(quality(task, progress).lines()))
    return 0


def _presets(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in PRESETS]
    if unknown or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} does not name each of {','.join(PRESETS)} once at most")
    return names


def _budgets(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(number) for number in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 1 for value in values) or len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different numbers from 0 to 1")
    return values


def _window(text: str) -> int:
    number = positive(text)
    if number < LEAST_WINDOW:
        raise argparse.ArgumentTypeError(f"{text!r} is less than {LEAST_WINDOW}")
    return number
