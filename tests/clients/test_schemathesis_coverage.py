"""Schemathesis with every value, valid and not, of every field of every operation: some 5,000 requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engine import FakeEngine
from test_server_schemathesis import run_schemathesis, varied
from threaded_rig import threaded_server

LIMIT_SECONDS = 900


@pytest.mark.timeout(LIMIT_SECONDS + 30)
def test_every_value_of_every_field_is_answered_as_documented(tmp_path: Path) -> None:
    with threaded_server(FakeEngine(varied)) as rig:
        run_schemathesis(rig, tmp_path, "--phases", "coverage", limit_seconds=LIMIT_SECONDS)
