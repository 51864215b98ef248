"""Where the model runs: what --device asks for, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from s2moe.engine.cpu import processor_name
from s2moe.engine.cuda_build import CudaBuild, version_text
from s2moe.engine.cuda_driver import LIBRARY_NAME, CudaDevice
from s2moe.engine.cuda_probe import CudaUnavailableError, Machine, probe_cuda
from s2moe.engine.errors import EngineStartError
from s2moe.engine.messages import Configure, ServingDevice

CPU: Final = "cpu"
CUDA: Final = "cuda"
NO_CACHE_ON_GPU: Final = (
    "the whole model is loaded onto the GPU, experts included, without an expert cache and a memory plan"
)


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

    def describe(self) -> str:
        """One line for the log."""
        if not self.gpus:
            name = processor_name()
            return f"the model runs on the CPU{f' ({name})' if name else ''}, as --device cpu says"
        gpus = " and ".join(gpu.describe() for gpu in self.gpus)
        driver = "" if self.driver is None else f", with a driver for CUDA {version_text(self.driver)}"
        return f"the model runs on {gpus}{driver}, as --device cuda says: {NO_CACHE_ON_GPU}"

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

    def check_holds(self, expert_bytes: int) -> None:
        """Raises EngineStartError where the experts alone, all `expert_bytes` of them, can never fit."""
        if not self.gpus or expert_bytes <= self.total_bytes:
            return
        raise EngineStartError(
            "insufficient_memory",
            f"--device cuda: the model's experts alone take {expert_bytes / 2**30:.1f} GiB, but "
            f"{' and '.join(gpu.describe() for gpu in self.gpus)} cannot hold them; use --device cpu, which "
            "reads experts from the drive as they are needed, or take a smaller model",
        )


ON_CPU: Final = Device()


def choose_device(
    configure: Configure, build_info: Mapping[str, Any], *, library: str = LIBRARY_NAME
) -> Device:
    """What `configure` asks for, never another. `build_info`: of s2moe_build_info(); `library`: of the
    driver, which is not touched unless a GPU is asked for.

    Raises EngineStartError.
    """
    if configure.device == CPU:
        return ON_CPU
    if configure.device != CUDA:
        raise EngineStartError(
            "invalid_device", f"--device {configure.device} is unknown; use {CPU} or {CUDA}"
        )
    try:
        probe = probe_cuda(CudaBuild.of_build_info(build_info), Machine.here(), library)
    except CudaUnavailableError as error:
        raise EngineStartError(
            "device_unavailable", f"--device cuda, but {error}, or use --device cpu"
        ) from error
    _refuse_cache_options(configure)
    return Device(probe.devices, probe.driver)


def _refuse_cache_options(configure: Configure) -> None:
    """Raises EngineStartError for what only an expert cache could do."""
    given = {
        "--memory-budget": configure.memory_budget_bytes != 0,
        "--io": configure.io != "auto",
        "--reader": configure.reader != "auto",
        "--hot-experts": configure.hot_experts_path is not None,
        "--expert-policy": configure.expert_policy != "cache",
        "--expert-trace": configure.expert_trace_path is not None,
    }
    for flag, is_given in given.items():
        if is_given:
            raise EngineStartError(
                "invalid_setting",
                f"{flag} is not possible with --device cuda, where {NO_CACHE_ON_GPU}; omit it, or use "
                "--device cpu",
            )
