"""For which GPUs a build has kernels."""

from __future__ import annotations

import pytest

from s2moe.engine.cuda_build import CudaBuild, Image

CODE, PTX, NONE = Image.MACHINE_CODE, Image.PTX, Image.NONE


@pytest.mark.parametrize(
    ("architectures", "capability", "image"),
    [
        ("89", (8, 9), CODE),
        ("89-real", (8, 9), CODE),
        ("89-virtual", (8, 9), PTX),
        # machine code: the same major version, from the minor one on
        ("80-real", (8, 9), CODE),
        ("89-real", (8, 6), NONE),
        ("80-real", (9, 0), NONE),
        # PTX: everything later
        ("80-virtual", (9, 0), PTX),
        ("80", (12, 0), PTX),
        ("90", (8, 9), NONE),
        # Jetsons share no machine code with other GPUs
        ("80-real", (8, 7), NONE),
        ("80", (8, 7), PTX),
        ("87-real", (8, 9), NONE),
        ("87", (8, 9), PTX),
        ("87-real", (8, 7), CODE),
        # for one chip, and for one family
        ("90a", (9, 0), CODE),
        ("90a", (10, 0), NONE),
        ("120a-real", (12, 1), NONE),
        ("120f", (12, 1), CODE),
        ("120f-virtual", (12, 1), PTX),
        ("120f", (13, 0), NONE),
        ("100", (10, 3), CODE),
        # the best of several
        ("75-virtual,80-virtual,86-real,89-real", (8, 9), CODE),
        ("75-virtual,86-real", (9, 0), PTX),
        ("87,89,90", (8, 6), NONE),
        ("87,89,90", (7, 5), NONE),
        # not known
        ("native", (8, 9), CODE),
        ("", (8, 9), CODE),
    ],
)
def test_kernels_for_a_capability(architectures: str, capability: tuple[int, int], image: Image) -> None:
    names = tuple(architectures.split(",")) if architectures else ()
    assert CudaBuild(True, (13, 0), names).image_for(capability) == image


def test_build_info_is_read() -> None:
    info = {"cuda": True, "cuda_toolkit": "12.6.85", "cuda_architectures": ["87", "89-real"]}
    assert CudaBuild.of_build_info(info) == CudaBuild(True, (12, 6), ("87", "89-real"))
    without = {"cuda": False, "cuda_toolkit": "", "cuda_architectures": []}
    assert CudaBuild.of_build_info(without) == CudaBuild(False)
