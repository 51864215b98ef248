"""Fixtures that hand out the demo model, built at the first use and kept in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from s2moe.engine.demo_model import TINY, ensure_demo_model


@pytest.fixture(scope="session")
def tiny_model_path() -> Path:
    """The variant with 8 experts, top-2: speaks English, loads in a second."""
    return ensure_demo_model(**TINY, progress=print)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The default demo model: 16 experts, top-4, 0.77 GB."""
    return ensure_demo_model(progress=print)
