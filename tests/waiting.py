"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 120.0
"""Costs nothing when all is well; a loaded machine of two cores may take most of it."""


def until(
    condition: Callable[[], bool], what: str = "what was waited for", *, seconds: float = PATIENCE_SECONDS
) -> None:
    """Raises AssertionError where it does not come to hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.02)
