"""Names and ranges of speculation that settings, requests and metrics share. What they mean is said at
s2moe_speculator_begin() in s2moe.h."""

from __future__ import annotations

from typing import Final, Literal, get_args

Method = Literal["s2moe", "expert-skip", "cascade", "off"]
Preset = Literal["exact", "balanced", "fast"]

METHODS: Final[tuple[str, ...]] = get_args(Method)
PRESETS: Final[tuple[str, ...]] = get_args(Preset)
CUSTOM_PRESET: Final = "custom"
"""What is reported for a preset of which a value was changed."""
MAX_NODES: Final = 7
"""Drafts that one evaluation verifies at most, and so the depth of the deepest one."""
MAX_REUSE_STRENGTH: Final = 10.0
MAX_EXPERTS: Final = 65536
"""More than any layer has. The engine knows the model's own limit."""
