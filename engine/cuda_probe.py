"""Whether CUDA can serve: asked of the driver before anything is loaded, since llama.cpp would take the CPU
without a word, or end the process at the first kernel that the GPU cannot run."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from s2moe.engine.cuda_build import CudaBuild, Image, architecture_of, version_text
from s2moe.engine.cuda_driver import (
    COMPAT_NOT_SUPPORTED_ON_DEVICE,
    LIBRARY_NAME,
    NO_DEVICE,
    STUB_LIBRARY,
    SYSTEM_DRIVER_MISMATCH,
    CudaDevice,
    CudaDriver,
    CudaDriverError,
)

CONTAINER_REMEDY: Final = "in a container pass --gpus all (on a Jetson --runtime nvidia)"
DRIVER_REMEDY: Final = f"install NVIDIA's driver, so that nvidia-smi shows the GPU; {CONTAINER_REMEDY}"

GROUP_OPTION: Final = '--group-add "$(stat -c %g /dev/dri/renderD128)"'
"""For a container's user on a Jetson: the number of the group `render` is not the same everywhere."""

_TEGRA_RELEASE = Path("/etc/nv_tegra_release")
_DEVICES = Path("/dev")
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_JETPACKS: Final = {32: 4, 34: 5, 35: 5, 36: 6, 38: 7}
"""By the major release of L4T."""
_LEAST_DRIVERS: Final = {11: 450, 12: 525, 13: 580}
"""Of NVIDIA's driver for Linux, by the major version of the toolkit."""


class CudaFault(StrEnum):
    """Why CUDA cannot serve."""

    NOT_BUILT = "not_built"
    NO_DRIVER = "no_driver"
    DRIVER_TOO_OLD = "driver_too_old"
    DRIVER_FAILED = "driver_failed"
    NO_DEVICE = "no_device"
    NO_KERNEL_IMAGE = "no_kernel_image"


class CudaUnavailableError(Exception):
    """CUDA cannot serve; the message is one clause that says why, and after a semicolon the remedies."""

    def __init__(self, fault: CudaFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True)
class Machine:
    """What remedies depend on."""

    l4t: tuple[int, str] | None = None
    """Jetson Linux: its major release, and all of it for people; None = not a Jetson, or a container that
    does not show it."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES; None = not set."""
    denied_node: str = ""
    """A device file that CUDA on a Jetson needs and that this user may not open; empty = none is known."""

    @classmethod
    def here(cls, tegra_release: Path = _TEGRA_RELEASE, devices: Path = _DEVICES) -> Machine:
        try:
            text = tegra_release.read_text(errors="replace")
        except OSError:
            text = ""
        match = re.search(r"\bR([0-9]+) \(release\), REVISION: ([0-9.]+)", text)
        l4t = None if match is None else (int(match[1]), f"R{match[1]}.{match[2]}")
        return cls(l4t, os.environ.get(_VISIBLE_DEVICES), _denied_node(devices))

    @property
    def jetson_text(self) -> str:
        """Empty: not known to be one."""
        if self.l4t is None:
            return ""
        major, release = self.l4t
        jetpack = f", JetPack {_JETPACKS[major]}" if major in _JETPACKS else ""
        return f"this Jetson (L4T {release}{jetpack})"


def _denied_node(devices: Path) -> str:
    # a container often does not show that it runs on a Jetson, but no other machine has this device
    memory = devices / "nvmap"
    if not memory.exists():
        return ""
    nodes = (devices / "dri" / "renderD128", memory)
    return next((str(node) for node in nodes if node.exists() and not _may_open(node)), "")


def _may_open(node: Path) -> bool:
    return os.access(node, os.R_OK | os.W_OK)


@dataclass(frozen=True)
class CudaProbe:
    """CUDA can serve."""

    devices: tuple[CudaDevice, ...]
    """All that are visible, integrated ones only where there is no other, as llama.cpp uses them."""
    driver: tuple[int, int]
    """The newest CUDA that the driver knows."""


def probe_cuda(build: CudaBuild, machine: Machine, library: str = LIBRARY_NAME) -> CudaProbe:
    """Asks the driver in `library`. Raises CudaUnavailableError."""
    if not build.is_enabled:
        raise CudaUnavailableError(CudaFault.NOT_BUILT, "this build has no CUDA; rebuild with `make cuda`")
    try:
        driver = CudaDriver(library)
    except OSError as error:
        raise CudaUnavailableError(
            CudaFault.NO_DRIVER, f"there is no CUDA driver ({error}); {_driver_remedy(machine)}"
        ) from error
    try:
        version = driver.version()
        # before it starts: an old driver may fail in many ways
        _check_version(build, version, machine)
        driver.start()
        devices = tuple(driver.devices())
    except CudaDriverError as error:
        raise _start_failure(error, machine) from error
    if not devices:
        raise _no_device(machine)
    has_others = not all(device.is_integrated for device in devices)
    used = [(i, device) for i, device in enumerate(devices) if not (has_others and device.is_integrated)]
    for index, device in used:
        _check_image(build, version, index, device)
    return CudaProbe(tuple(device for _, device in used), version)


def _driver_remedy(machine: Machine) -> str:
    if machine.jetson_text:
        return (
            f"on {machine.jetson_text} it comes with JetPack: install the package nvidia-l4t-cuda; "
            "in a container pass --runtime nvidia"
        )
    return DRIVER_REMEDY


def _check_version(build: CudaBuild, version: tuple[int, int], machine: Machine) -> None:
    """Minor versions may differ: programs of one major version run on every driver of that version."""
    if build.toolkit is None or version[0] >= build.toolkit[0]:
        return
    major = build.toolkit[0]
    if machine.jetson_text:
        update = (
            f"on {machine.jetson_text} the driver comes with JetPack: rebuild there with JetPack's own CUDA "
            f"toolkit, or install a JetPack that has CUDA {major}"
        )
    else:
        least = f" (version {_LEAST_DRIVERS[major]} or newer)" if major in _LEAST_DRIVERS else ""
        update = (
            f"install a driver for CUDA {major}{least}, in a container on its host, or rebuild with a "
            f"toolkit of CUDA {version[0]}"
        )
    raise CudaUnavailableError(
        CudaFault.DRIVER_TOO_OLD,
        f"the driver knows CUDA {version_text(version)} at most, and the libraries were built with "
        f"{build.toolkit_text}; {update}",
    )


def _start_failure(error: CudaDriverError, machine: Machine) -> CudaUnavailableError:
    if error.code == NO_DEVICE:
        return _no_device(machine)
    if error.code == STUB_LIBRARY:
        return CudaUnavailableError(
            CudaFault.NO_DRIVER,
            f"the {LIBRARY_NAME} that is found is the toolkit's stub and no driver; take its folder out of "
            f"LD_LIBRARY_PATH; {_driver_remedy(machine)}",
        )
    if error.code == SYSTEM_DRIVER_MISMATCH:
        remedy = "the driver's library and its kernel module differ: reboot after an update of the driver"
    elif error.code == COMPAT_NOT_SUPPORTED_ON_DEVICE:
        remedy = "the CUDA compatibility package does not support this GPU: update the host's driver instead"
    elif machine.jetson_text or machine.denied_node:
        remedy = _device_remedy(machine)
    else:
        remedy = (
            "check nvidia-smi and the kernel's log, and load nvidia_uvm with `nvidia-modprobe -u`; "
            + CONTAINER_REMEDY
        )
    return CudaUnavailableError(CudaFault.DRIVER_FAILED, f"the CUDA driver does not work: {error}; {remedy}")


def _device_remedy(machine: Machine) -> str:
    """A driver that is there and has no GPU for us."""
    if machine.jetson_text or machine.denied_node:
        denied = f"this user may not open {machine.denied_node}: " if machine.denied_node else ""
        return (
            f"{denied}on {machine.jetson_text or 'a Jetson'} the user must be in the groups video and "
            f"render; in a container pass --runtime nvidia --group-add video {GROUP_OPTION}"
        )
    return f"check nvidia-smi -L; {CONTAINER_REMEDY}"


def _no_device(machine: Machine) -> CudaUnavailableError:
    hidden = ""
    if machine.visible_devices is not None:
        hidden = f"{_VISIBLE_DEVICES} is {machine.visible_devices!r}: unset it or name a GPU that there is; "
    return CudaUnavailableError(
        CudaFault.NO_DEVICE, f"the driver shows no GPU; {hidden}{_device_remedy(machine)}"
    )


def _check_image(build: CudaBuild, version: tuple[int, int], index: int, device: CudaDevice) -> None:
    image = build.image_for(device.capability)
    architecture = architecture_of(device.capability)
    command = f"`make cuda CUDA_ARCHITECTURES={architecture}`"
    rebuild = f"rebuild with CMAKE_CUDA_ARCHITECTURES={architecture} ({command})"
    if image is Image.NONE:
        raise CudaUnavailableError(
            CudaFault.NO_KERNEL_IMAGE,
            f"no kernels were built for GPU {index}, {device.describe()}, only for "
            f"{build.architectures_text}; {rebuild}, or hide it with {_VISIBLE_DEVICES}",
        )
    if image is Image.PTX and build.toolkit is not None and version < build.toolkit:
        raise CudaUnavailableError(
            CudaFault.DRIVER_TOO_OLD,
            f"for GPU {index}, {device.describe()}, there is only PTX of {build.toolkit_text}, which a "
            f"driver for CUDA {version_text(version)} cannot compile; update the driver, or {rebuild}",
        )
