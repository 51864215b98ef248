"""Types of command line arguments for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

from s2moe.server.settings import parse_budget_bytes, parse_cache_bytes

MOST_TOKENS: Final = 10_000_000


def positive(text: str) -> int:
    return _number(text, 1)


def not_negative(text: str) -> int:
    return _number(text, 0)


def budget(text: str) -> object:
    return _size(text, parse_budget_bytes)


def cache_size(text: str) -> object:
    return _size(text, parse_cache_bytes)


def _size(text: str, parse: Callable[[object], object]) -> object:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    if int(text) > MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MOST_TOKENS}")
    return int(text)
