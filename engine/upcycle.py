"""The numbers of the demo model: routers and low-rank variants of dense matrices, quantised to Q4_0.

The same arguments give the same bytes on every machine. For that no floating-point result may depend on the
order of a sum: A and B hold integers so small that B·A is exact in float32 in any order, with or without FMA;
norms are sums of integers; everything else is elementwise. The integers come from the raw words of PCG64,
whose stream numpy guarantees, unlike that of `standard_normal`.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

MAX_RANK: Final = 16
"""Up to this rank B·A is exact in float32: 16 · 1020² < 2²⁴."""

Q4_0_BLOCK_VALUES: Final = 32
Q4_0_BLOCK_BYTES: Final = 18
"""One float16 scale and 32 numbers of 4 bits."""

_BELL_STD: Final = math.sqrt(8 * (256**2 - 1) / 12)
"""Standard deviation of `_bell_integers`: a sum of 8 uniform bytes."""
_EVEN_BYTES: Final = np.uint64(0x00FF00FF00FF00FF)
_LANE_SUM: Final = np.uint64(0x0001000100010001)
_NORM_UNIT: Final = 2.0**-16
"""Weights are rounded to multiples of this for their norm."""


def router_weights(n_expert: int, n_embd: int, *, std: float, key: tuple[int, ...]) -> Float32Array:
    """Nearly normal router weights [n_expert, n_embd]; `key` names the random stream."""
    scale = np.float64(std / _BELL_STD)
    return (_bell_integers((n_expert, n_embd), key).astype(np.float64) * scale).astype(np.float32)


def perturbed_q4_0(
    dense: Float32Array, n_expert: int, *, sigma: float, rank: int, key: tuple[int, ...]
) -> Bytes:
    """Variants of a matrix, one per expert, as Q4_0: W + sigma · ‖W‖_F / ‖B·A‖_F · B·A with B·A of this rank.

    dense: W, [n_out, n_in], n_in a multiple of 32. key: names the random stream; expert e uses (*key, e), so
    a model with more experts starts with those of one with fewer. Returns [n_expert, n_out, n_in / 32 · 18].
    """
    n_out, n_in = dense.shape
    dense_norm = _frobenius_norm(dense)
    # Transposed, so that a Q4_0 block lies along the first dimension and numpy's passes run along rows.
    transposed = np.ascontiguousarray(dense.T)
    quantised = np.empty((n_expert, n_out, n_in // Q4_0_BLOCK_VALUES, Q4_0_BLOCK_BYTES), np.uint8)
    for expert in range(n_expert):
        a = _bell_integers((rank, n_out), (*key, expert, 0))
        b = _bell_integers((n_in, rank), (*key, expert, 1))
        scale = np.float32(sigma * dense_norm / _product_norm(a, b))
        for block in range(n_in // Q4_0_BLOCK_VALUES):
            columns = slice(block * Q4_0_BLOCK_VALUES, (block + 1) * Q4_0_BLOCK_VALUES)
            weights = b[columns] @ a
            weights *= scale
            weights += transposed[columns]
            _quantise_q4_0_into(quantised[expert, :, block], weights)
    return quantised.reshape(n_expert, n_out, q4_0_row_bytes(n_in))


def q4_0_row_bytes(n_values: int) -> int:
    """Size of a row of `n_values`, a multiple of 32, in Q4_0."""
    return n_values // Q4_0_BLOCK_VALUES * Q4_0_BLOCK_BYTES


def _bell_integers(shape: tuple[int, int], key: tuple[int, ...]) -> Float32Array:
    """Integers of mean 0 within ±1020, nearly normal with deviation `_BELL_STD`, from the stream `key`."""
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(math.prod(shape))
    # Sum the 8 bytes of each word: pairs of bytes in four 16-bit lanes, then all lanes into the top one.
    lanes = (words & _EVEN_BYTES) + (words >> np.uint64(8) & _EVEN_BYTES)
    sums = lanes * _LANE_SUM >> np.uint64(48)
    return (sums.astype(np.float32) - np.float32(4 * 255)).reshape(shape)


def _frobenius_norm(weights: Float32Array) -> float:
    units = np.rint(weights * np.float32(1 / _NORM_UNIT)).astype(np.int64)
    return math.sqrt(int(np.square(units).sum())) * _NORM_UNIT


def _product_norm(a: Float32Array, b: Float32Array) -> float:
    """‖B·A‖_F = √tr(A·Aᵀ·BᵀB) without forming B·A: exact until the root, for the Gram matrices hold integers
    below 2⁵³ and Python multiplies them."""
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    gram_a, gram_b = (a64 @ a64.T).ravel().tolist(), (b64.T @ b64).ravel().tolist()
    return math.sqrt(sum(int(x) * int(y) for x, y in zip(gram_a, gram_b, strict=True)))


def _quantise_q4_0_into(out: Bytes, weights: Float32Array) -> None:
    """Quantise blocks as ggml does: the value of largest magnitude becomes -8. Clobbers `weights`.

    weights: [32, n], a block per column; out: [n, 18], a block per row.
    """
    highest, lowest = weights.max(axis=0), weights.min(axis=0)
    scales = np.where(highest > -lowest, highest, lowest) * np.float32(-1 / 8)
    weights *= np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    weights += np.float32(8.5)
    np.minimum(weights, np.float32(15), out=weights)
    nibbles = weights.astype(np.uint8)
    half = Q4_0_BLOCK_VALUES // 2
    out[:, :2] = scales.astype("<f2")[:, None].view(np.uint8)
    out[:, 2:] = (nibbles[:half] | nibbles[half:] << 4).T
