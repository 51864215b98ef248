"""The test's side of fake_libcuda.c: a CUDA driver of any version, with any GPUs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from s2moe.engine.cuda_driver import LIBRARY_NAME, CudaDevice

SOURCE = Path(__file__).with_name("fake_libcuda.c")
RTX_4090 = CudaDevice("NVIDIA GeForce RTX 4090", (8, 9), 25_756_696_576, is_integrated=False)
ORIN = CudaDevice("Orin", (8, 7), 65_886_281_728, is_integrated=True)
H100 = CudaDevice("NVIDIA H100 80GB HBM3", (9, 0), 85_031_714_816, is_integrated=False)
RTX_3060 = CudaDevice("NVIDIA GeForce RTX 3060", (8, 6), 12_622_168_064, is_integrated=False)


def build_driver(folder: Path) -> Path:
    """Compiles the driver into `folder`, under its usual name. Raises CalledProcessError."""
    library = folder / LIBRARY_NAME
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY_NAME}"]
    subprocess.run(["cc", *options, "-o", str(library), str(SOURCE)], check=True, capture_output=True)
    return library


def driver_environment(
    devices: Sequence[CudaDevice] = (), *, version: int = 12060, init: int = 0
) -> dict[str, str]:
    """What the driver plays. `version`: of cuDriverGetVersion; `init`: the CUresult of cuInit."""
    described = (
        f"{each.name}:{each.capability[0]}:{each.capability[1]}:{each.total_bytes}:{int(each.is_integrated)}"
        for each in devices
    )
    return {
        "FAKE_CUDA_VERSION": str(version),
        "FAKE_CUDA_INIT": str(init),
        "FAKE_CUDA_DEVICES": ";".join(described),
    }
