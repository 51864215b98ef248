"""NVIDIA's driver through libcuda.so.1: its version, and which GPUs it shows to this process."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint
from dataclasses import dataclass
from typing import Any, Final

LIBRARY_NAME: Final = "libcuda.so.1"

STUB_LIBRARY: Final = 34
NO_DEVICE: Final = 100
SYSTEM_DRIVER_MISMATCH: Final = 803
COMPAT_NOT_SUPPORTED_ON_DEVICE: Final = 804
UNKNOWN: Final = 999
"""Values of CUresult, which are part of the driver's ABI."""

_ATTRIBUTE_INTEGRATED = 18
_ATTRIBUTE_CAPABILITY_MAJOR = 75
_ATTRIBUTE_CAPABILITY_MINOR = 76
"""Values of CUdevice_attribute."""
_NAME_BYTES = 256


class CudaDriverError(Exception):
    """A call into the driver failed; `code` is its CUresult."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function} gives {name} ({code})")
        self.code = code


@dataclass(frozen=True)
class CudaDevice:
    """A GPU as the driver describes it."""

    name: str
    capability: tuple[int, int]
    """Compute capability: major, minor."""
    total_bytes: int
    is_integrated: bool
    """Whether its memory is the machine's."""

    @property
    def capability_text(self) -> str:
        major, minor = self.capability
        return f"{major}.{minor}"

    def describe(self) -> str:
        shared = ", shared with the CPU" if self.is_integrated else ""
        return (
            f"{self.name} (compute capability {self.capability_text}, "
            f"{self.total_bytes / 2**30:.1f} GiB{shared})"
        )


class CudaDriver:
    """Used by one thread. Makes no context, so that nothing is allocated on any GPU."""

    def __init__(self, library: str = LIBRARY_NAME) -> None:
        """Raises OSError where there is no driver to load."""
        self._lib = ctypes.CDLL(library)

    def version(self) -> tuple[int, int]:
        """The newest CUDA that the driver knows: major, minor. Needs no GPU. Raises CudaDriverError."""
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        return version.value // 1000, version.value % 1000 // 10

    def start(self) -> None:
        """Must come before devices(). Raises CudaDriverError, with NO_DEVICE where no GPU is visible."""
        self._call("cuInit", c_uint(0))

    def devices(self) -> list[CudaDevice]:
        """The visible ones, in the order in which llama.cpp will see them. Raises CudaDriverError."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return [self._device(ordinal) for ordinal in range(count.value)]

    def _device(self, ordinal: int) -> CudaDevice:
        handle = c_int()
        self._call("cuDeviceGet", byref(handle), c_int(ordinal))
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("cuDeviceGetName", name, c_int(_NAME_BYTES), handle)
        total_bytes = c_size_t()
        self._call("cuDeviceTotalMem_v2", byref(total_bytes), handle)
        return CudaDevice(
            name=name.value.decode(errors="replace"),
            capability=(
                self._attribute(_ATTRIBUTE_CAPABILITY_MAJOR, handle),
                self._attribute(_ATTRIBUTE_CAPABILITY_MINOR, handle),
            ),
            total_bytes=total_bytes.value,
            is_integrated=bool(self._attribute(_ATTRIBUTE_INTEGRATED, handle)),
        )

    def _attribute(self, attribute: int, handle: c_int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), c_int(attribute), handle)
        return value.value

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            code: int = getattr(self._lib, function)(*arguments)
        except AttributeError as error:
            raise CudaDriverError(function, UNKNOWN, "no such function in the library") from error
        if code != 0:
            raise CudaDriverError(function, code, self._name_of(code))

    def _name_of(self, code: int) -> str:
        name = c_char_p()
        try:
            known = self._lib.cuGetErrorName(c_int(code), byref(name)) == 0
        except AttributeError:
            known = False
        return name.value.decode(errors="replace") if known and name.value else "an unknown error"
