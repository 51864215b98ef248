"""Where s2moe keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """S2MOE_CACHE_DIR, else s2moe under the user's cache directory (XDG_CACHE_HOME, else ~/.cache).

    Raises RuntimeError when neither variable is set and the user has no home.
    """
    if chosen := os.environ.get("S2MOE_CACHE_DIR"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "s2moe"
    return Path.home() / ".cache" / "s2moe"
