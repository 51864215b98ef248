"""The engine process with libraries that say that they were built for CUDA; everything else is real.

cuda_engine.py ARCHITECTURES TOOLKIT --fd N
"""

from __future__ import annotations

import sys
from typing import Any

from s2moe.engine import __main__ as program
from s2moe.engine.native import Library

_ARCHITECTURES, _TOOLKIT = sys.argv[1:3]
_true_build_info = Library.build_info


def build_info(self: Library) -> dict[str, Any]:
    return _true_build_info(self) | {
        "cuda": True,
        "cuda_toolkit": _TOOLKIT,
        "cuda_architectures": _ARCHITECTURES.split(","),
    }


del sys.argv[1:3]
Library.build_info = build_info  # type: ignore[method-assign]
sys.exit(program.main())
