"""A fake hub with one model, and no proxy, token or setting from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fake_hub import MODEL, FakeHub, content_of

# as the command does it, before huggingface_hub is imported: it would look for the real hub
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        is_hubs = name.startswith("HF_") and name != "HF_HUB_DISABLE_TELEMETRY"
        if name.startswith("S2MOE_") or name.lower().endswith("_proxy") or is_hubs:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from s2moe.server.pull import download

    monkeypatch.setattr(download, "RETRY_WAITS_SECONDS", (0.01, 0.02, 0.04, 0.08, 0.16))


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub({MODEL: content_of(200_000), "README.md": b"# A model"}) as hub:
        yield hub
