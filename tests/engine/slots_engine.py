"""The engine process as on a machine with a GPU, with the CPU in the GPU's place: slots, their protocol and
their rules are those of a GPU, its kernels are not.

slots_engine.py SLOTS FREE_BYTES --fd N
"""

from __future__ import annotations

import sys
from typing import Any

from s2moe.engine import __main__ as program
from s2moe.engine import gpu_slots
from s2moe.engine.device import Device
from s2moe.engine.model import Model
from s2moe.engine.native import Library

_SLOTS, _FREE_BYTES = sys.argv[1], int(sys.argv[2])
_true_build_info = Library.build_info


def build_info(self: Library) -> dict[str, Any]:
    cuda = {"cuda": True, "cuda_toolkit": "12.6", "cuda_architectures": ["87", "89"]}
    return _true_build_info(self) | cuda


def gpu_memory(_library: Library, _index: int) -> tuple[int, int]:
    return _FREE_BYTES, _FREE_BYTES


del sys.argv[1:3]
Library.build_info = build_info  # type: ignore[method-assign]
Device.slots_name = property(lambda _: _SLOTS)  # type: ignore[assignment]
Model._check_gpus = lambda _: None  # type: ignore[method-assign]
gpu_slots.gpu_memory = gpu_memory  # type: ignore[attr-defined]
sys.exit(program.main())
