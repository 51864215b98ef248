from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from supervisor_rig import MakeRig, Rig


@pytest.fixture
async def make_rig(tmp_path: Path) -> AsyncIterator[MakeRig]:
    rigs: list[Rig] = []

    def make(**options: object) -> Rig:
        rig = Rig(tmp_path, **options)  # type: ignore[arg-type]
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        await rig.supervisor.stop(2)


@pytest.fixture
async def rig(make_rig: MakeRig) -> Rig:
    """A normal engine, ready."""
    rig = make_rig()
    await rig.supervisor.start()
    await rig.ready()
    return rig
