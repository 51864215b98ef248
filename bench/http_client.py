"""httpx, which `make setup` does not install."""

from __future__ import annotations

import sys

try:
    import httpx as httpx
except ImportError as error:
    sys.exit(f"s2moe.bench: error: benchmarks need more than the server ({error}): run `make setup-dev`")
