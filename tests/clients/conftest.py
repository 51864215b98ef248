"""Makes the fake engine and the rigs of the other folders importable."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "server"), str(TESTS / "e2e")]
