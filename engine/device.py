"""Where the model runs: what --device asks for, checked before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from s2moe.engine.cpu import processor_name
from s2moe.engine.cuda_build import CudaBuild, version_text
from s2moe.engine.cuda_driver import LIBRARY_NAME, CudaDevice
from s2moe.engine.cuda_probe import CudaFault, CudaUnavailableError, Machine, probe_cuda
from s2moe.engine.errors import EngineStartError
from s2moe.engine.messages import Configure, ServingDevice

CPU: Final = "cpu"
CUDA: Final = "cuda"
MODULE_LOADING: Final = "CUDA_MODULE_LOADING"
"""A kernel that waits for the host must not be in the way of another one's loading."""
_FAULTS_OF_THE_BUILD: Final = (CudaFault.NOT_BUILT, CudaFault.NO_KERNEL_IMAGE)
"""They stay; a driver may appear, as after a boot or an update."""


@dataclass(frozen=True)
class Device:
    """What serves."""

    gpus: tuple[CudaDevice, ...] = ()
    """Empty: the CPU."""
    driver: tuple[int, int] | None = None
    """The newest CUDA that the GPUs' driver knows."""

    @property
    def total_bytes(self) -> int:
        """Memory of all GPUs."""
        return sum(gpu.total_bytes for gpu in self.gpus)

    @property
    def names(self) -> str:
        """For what is learnt or kept for this device alone."""
        return " and ".join([CUDA, *(gpu.name for gpu in self.gpus)]) if self.gpus else CPU

    def describe(self) -> str:
        """One line for the log."""
        if not self.gpus:
            name = processor_name()
            return f"the model runs on the CPU{f' ({name})' if name else ''}, as --device cpu says"
        gpus = " and ".join(gpu.describe() for gpu in self.gpus)
        driver = "" if self.driver is None else f", with a driver for CUDA {version_text(self.driver)}"
        return f"the model runs on {gpus}{driver}, as --device cuda says"

    @property
    def slots_name(self) -> str:
        """What the native library calls the GPU that has slots for experts."""
        return "cuda:0"

    @property
    def is_unified(self) -> bool:
        """Whether that GPU shares the machine's memory."""
        return self.gpus[0].is_integrated

    def to_wire(self) -> list[ServingDevice]:
        if not self.gpus:
            return [ServingDevice(kind=CPU, name=processor_name())]
        return [
            ServingDevice(
                kind=CUDA,
                name=gpu.name,
                compute_capability=gpu.capability_text,
                total_bytes=gpu.total_bytes,
            )
            for gpu in self.gpus
        ]


ON_CPU: Final = Device()


def choose_device(
    configure: Configure, build_info: Mapping[str, Any], *, library: str = LIBRARY_NAME
) -> Device:
    """What `configure` asks for, never another. `build_info`: of s2moe_build_info(); `library`: of the
    driver, which is not touched unless a GPU is asked for.

    Raises EngineStartError.
    """
    if configure.device == CPU:
        if configure.vram_budget_bytes:
            raise EngineStartError(
                "invalid_setting", "--vram-budget is for --device cuda; omit it, or use that device"
            )
        return ON_CPU
    if configure.device != CUDA:
        raise EngineStartError(
            "invalid_device", f"--device {configure.device} is unknown; use {CPU} or {CUDA}"
        )
    os.environ.setdefault(MODULE_LOADING, "EAGER")  # read when the driver starts
    try:
        probe = probe_cuda(CudaBuild.of_build_info(build_info), Machine.here(), library)
    except CudaUnavailableError as error:
        code = "device_not_built" if error.fault in _FAULTS_OF_THE_BUILD else "device_unavailable"
        raise EngineStartError(code, f"--device cuda, but {error}, or use --device cpu") from error
    return Device(probe.devices, probe.driver)
