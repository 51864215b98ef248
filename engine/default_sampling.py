"""What requests get for sampling that do not say otherwise. The choice itself is native/src/sampler.cpp's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from s2moe.engine.messages import Sampling

_MAX_TOKENS: Final = 2**31 - 1
_FIELDS: Final = (
    ("temperature", "temp", 0.0, 100.0, 0.8),
    ("top_p", "top_p", 0.0, 1.0, 0.95),
    ("top_k", "top_k", 0, _MAX_TOKENS, 40),
    ("min_p", "min_p", 0.0, 1.0, 0.05),
    ("repeat_penalty", "penalty_repeat", 0.001, 1000.0, 1.0),
    ("repeat_last_n", "penalty_last_n", 0, 2**20, 64),
)
"""Field, key below `general.sampling`, the range in which a recommendation counts, llama.cpp's default."""


def default_sampling(metadata: Callable[[str], str]) -> Sampling:
    """`metadata`: a value of the model's metadata as text, "" if there is none.

    Where the model recommends nothing, or what is out of range, llama.cpp's default stands.
    """
    values: dict[str, Any] = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    for field, key, least, most, fallback in _FIELDS:
        number = _number(metadata(f"general.sampling.{key}"))
        value = number if number is not None and least <= number <= most else fallback
        # where the default is a whole number, fractions are cut off
        values[field] = int(value) if isinstance(fallback, int) else value
    return Sampling(**values)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
