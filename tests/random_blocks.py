"""Random weights in block formats that the gguf package decodes but cannot encode."""

from __future__ import annotations

from typing import Final

import gguf
import numpy as np
import numpy.typing as npt

K_QUANTS: Final[dict[gguf.GGMLQuantizationType, tuple[int, int | None]]] = {
    gguf.GGMLQuantizationType.Q2_K: (80, 82),
    gguf.GGMLQuantizationType.Q3_K: (108, None),
    gguf.GGMLQuantizationType.Q4_K: (0, 2),
    gguf.GGMLQuantizationType.Q5_K: (0, 2),
    gguf.GGMLQuantizationType.Q6_K: (208, None),
    gguf.GGMLQuantizationType.IQ4_NL: (0, None),
}
"""Where a block keeps its float16 scale `d` and, if its values are d·q − dmin·m, its `dmin`."""


def random_blocks(
    kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], std: float, random: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """A tensor of `shape` whose bits are random but for the scales, which centre the values near 0 and give
    them about the standard deviation `std`.

    Returns [..., bytes of a row]; every bit pattern is one that the format allows and every scale is finite.
    """
    d, dmin = K_QUANTS[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        raise ValueError(f"rows of {shape[-1]} values are no whole blocks of {block_size} ({kind.name})")
    row_bytes = shape[-1] // block_size * block_bytes
    blocks = random.integers(0, 256, (int(np.prod(shape)) // block_size, block_bytes), dtype=np.uint8)
    _set_half(blocks, d, 1.0)
    if dmin is not None:
        _set_half(blocks, dmin, 0.0)
        positive = gguf.dequantize(blocks, kind).mean()
        _set_half(blocks, d, 0.0)
        _set_half(blocks, dmin, 1.0)
        negative = gguf.dequantize(blocks, kind).mean()
        _set_half(blocks, d, 1.0)
        _set_half(blocks, dmin, -positive / negative)
    scale = std / gguf.dequantize(blocks, kind).std()
    # blocks of real files differ in scale, so these do
    spread = random.uniform(0.8, 1.2, len(blocks)).astype(np.float32)
    for offset in (d, dmin):
        if offset is not None:
            _set_half(blocks, offset, _half(blocks, offset) * scale * spread)
    return blocks.reshape(*shape[:-1], row_bytes)


def _half(blocks: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16)[:, 0].astype(np.float32)


def _set_half(blocks: npt.NDArray[np.uint8], offset: int, value: float | npt.NDArray[np.float32]) -> None:
    halves = np.broadcast_to(np.asarray(value, np.float16), (len(blocks),))
    blocks[:, offset : offset + 2] = halves[:, None].copy().view(np.uint8)
