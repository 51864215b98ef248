"""The engine process as on a machine with a GPU, with the CPU in the GPU's place: slots, their protocol and
their rules are those of a GPU, its kernels are not.

slots_engine.py SLOTS FREE_BYTES WHOLE_ROOM_BYTES --fd N
"""

from __future__ import annotations

import resource
import sys
from typing import Any

from s2moe.engine import __main__ as program
from s2moe.engine import gpu_slots
from s2moe.engine.device import Device
from s2moe.engine.loading import LoadedModel, Loader, Progress
from s2moe.engine.model import Model
from s2moe.engine.native import Library

_SLOTS, _FREE_BYTES, _WHOLE_ROOM_BYTES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
_true_build_info = Library.build_info
_true_load_whole = Loader._load_whole


def build_info(self: Library) -> dict[str, Any]:
    cuda = {"cuda": True, "cuda_toolkit": "12.6", "cuda_architectures": ["87", "89"]}
    return _true_build_info(self) | cuda


def gpu_memory(_library: Library, _index: int) -> tuple[int, int]:
    return _FREE_BYTES, _FREE_BYTES


def load_whole(self: Loader, on_progress: Progress) -> LoadedModel:
    """Into as much memory as a GPU that is too small would have."""
    if _WHOLE_ROOM_BYTES:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - as engine/memory.py
            n_pages = int(file.read().split()[0])
        limit = n_pages * resource.getpagesize() + _WHOLE_ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return _true_load_whole(self, on_progress)


del sys.argv[1:4]
Library.build_info = build_info  # type: ignore[method-assign]
Device.slots_name = property(lambda _: _SLOTS)  # type: ignore[assignment]
Model._check_gpus = lambda _: None  # type: ignore[method-assign]
gpu_slots.gpu_memory = gpu_memory  # type: ignore[attr-defined]
Loader._load_whole = load_whole  # type: ignore[method-assign]
sys.exit(program.main())
