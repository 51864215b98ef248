"""What the native libraries were built for, and whether that runs on a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

_ARCHITECTURE = re.compile(r"(?P<number>[0-9]{2,3})(?P<scope>[af]?)(?:-(?P<kind>real|virtual))?")
_TEGRA: Final = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)})
"""Capabilities of Jetsons: machine code of another capability is not promised to run on them, nor theirs
elsewhere."""


class Image(Enum):
    """In which form the kernels can run on a GPU."""

    MACHINE_CODE = "machine code"
    PTX = "PTX"
    """The driver compiles it when it is first used, which it can if it knows the toolkit's CUDA."""
    NONE = "none"


@dataclass(frozen=True)
class CudaBuild:
    """Of the native libraries."""

    is_enabled: bool
    toolkit: tuple[int, int] | None = None
    """Version of the CUDA toolkit; None = not known."""
    architectures: tuple[str, ...] = ()
    """As in CMAKE_CUDA_ARCHITECTURES: `87`, `89-real`, `90-virtual`, `120a`; empty = not known."""

    @classmethod
    def of_build_info(cls, info: Mapping[str, Any]) -> CudaBuild:
        """`info`: the object of s2moe_build_info()."""
        version = re.match(r"([0-9]+)\.([0-9]+)", info.get("cuda_toolkit", ""))
        return cls(
            is_enabled=info["cuda"],
            toolkit=None if version is None else (int(version[1]), int(version[2])),
            architectures=tuple(info.get("cuda_architectures", ())),
        )

    @property
    def toolkit_text(self) -> str:
        return "an unknown CUDA" if self.toolkit is None else f"CUDA {version_text(self.toolkit)}"

    @property
    def architectures_text(self) -> str:
        return ", ".join(self.architectures)

    def image_for(self, capability: tuple[int, int]) -> Image:
        """The best there is for a compute capability; MACHINE_CODE also where the architectures are not
        known, as with `native`."""
        images = {_image_of(architecture, capability) for architecture in self.architectures}
        if not images or None in images or Image.MACHINE_CODE in images:
            return Image.MACHINE_CODE
        return Image.PTX if Image.PTX in images else Image.NONE


def architecture_of(capability: tuple[int, int]) -> str:
    """(8, 7) → `87`, for CMAKE_CUDA_ARCHITECTURES."""
    major, minor = capability
    return f"{major}{minor}"


def version_text(version: tuple[int, int]) -> str:
    major, minor = version
    return f"{major}.{minor}"


def _image_of(architecture: str, capability: tuple[int, int]) -> Image | None:
    """None for a word of CMake's that says nothing about chips."""
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        return None
    built = int(match["number"][:-1]), int(match["number"][-1])
    if match["scope"] == "a":  # for this chip alone, in either form
        is_same_family = built == capability
    else:
        is_same_family = built[0] == capability[0] and built <= capability
    if match["kind"] != "virtual" and is_same_family and not _crosses_tegra(built, capability):
        return Image.MACHINE_CODE
    if match["kind"] != "real" and (is_same_family or (not match["scope"] and built <= capability)):
        return Image.PTX
    return Image.NONE


def _crosses_tegra(built: tuple[int, int], capability: tuple[int, int]) -> bool:
    return built != capability and (built in _TEGRA or capability in _TEGRA)
