"""Top-1 agreement from files of `s2moe quality --json`, by the names that methods have here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class QualityFileError(Exception):
    """A file is no result of `s2moe quality`; the message names it."""


def read_agreement(paths: Sequence[Path]) -> dict[str, float]:
    """Share of committed tokens whose likeliest token is the exact target's, by method; of several files with
    the same setting the last one's. Raises QualityFileError."""
    agreement: dict[str, float] = {}
    for path in paths:
        try:
            data = json.loads(path.read_text())
            for setting in data["settings"]:
                name = _method_name(setting["options"])
                rows = setting["rows"]["all"]
                if name is not None and rows is not None:
                    agreement[name] = float(rows["same_top1"])
        except OSError as error:
            raise QualityFileError(f"--quality: cannot read {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise QualityFileError(f"--quality: {path} is no JSON of `s2moe quality` ({error!r})") from error
    return agreement


def _method_name(options: dict[str, Any]) -> str | None:
    """None: not a setting that is compared here."""
    rest = set(options) - {"method", "preset", "error_budget"}
    if options.get("method", "s2moe") != "s2moe" or rest:
        return None
    if "error_budget" in options:
        balanced = options.get("preset", "balanced") == "balanced"
        return f"budget-{options['error_budget']:g}" if balanced else None
    preset = options.get("preset", "balanced")
    return preset if isinstance(preset, str) else None
