"""ctypes binding of s2moe_gate_select(): the gate's rule for one layer, as verification applies it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_double, c_float, c_int32, c_uint8
from typing import Any

import numpy as np
import numpy.typing as npt

from s2moe.engine.native import Library

from gate_reference import Choice, GateSettings, Router, Scores

_SCORES_ARE_PROBABILITIES, _WEIGHTS_ARE_LOGITS = 1, 2


class _Settings(ctypes.Structure):
    """struct s2moe_gate_settings."""

    _fields_ = (
        ("error_budget", c_double),
        ("reuse_strength", c_double),
        ("residency_weight", c_double),
        ("reuse_cap", c_int32),
        ("single_token_bias", c_bool),
    )


_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "s2moe_gate_select": (
        c_int32,
        [
            POINTER(_Settings), c_int32, c_int32, c_int32, c_int32, POINTER(c_float), POINTER(c_float),
            POINTER(c_uint8), POINTER(c_double), POINTER(c_double), POINTER(c_int32), POINTER(c_int32),
            POINTER(c_double),
        ],
    ),
}  # fmt: skip


def select_experts(
    library: Library,
    settings: GateSettings,
    router: Router,
    residency: npt.NDArray[np.uint8],
    prefixes: Scores,
    allowances: Scores,
) -> list[Choice]:
    """As gate_reference.choose_experts()."""
    library.declare(_PROTOTYPES)
    n_rows, n_expert = router.scores.shape
    scores = np.ascontiguousarray(router.scores, np.float32)
    weights = np.ascontiguousarray(router.weights, np.float32)
    exact = np.full((n_rows, router.k), -1, np.int32)
    chosen = np.full((n_rows, router.k), -1, np.int32)
    displaced = np.zeros(n_rows)
    native = _Settings(
        settings.budget,
        settings.strength,
        settings.residency_weight,
        settings.cap,
        settings.single_token_bias,
    )
    kind = _SCORES_ARE_PROBABILITIES * router.scores_are_probabilities
    kind |= _WEIGHTS_ARE_LOGITS * router.weights_are_logits

    def pointer(array: npt.NDArray[Any], kind: Any) -> Any:
        return array.ctypes.data_as(POINTER(kind))

    library.check(
        library._lib.s2moe_gate_select(
            ctypes.byref(native),
            n_rows,
            n_expert,
            router.k,
            kind,
            pointer(scores, c_float),
            pointer(weights, c_float),
            pointer(np.ascontiguousarray(residency, np.uint8), c_uint8),
            pointer(np.ascontiguousarray(prefixes, np.float64), c_double),
            pointer(np.ascontiguousarray(allowances, np.float64), c_double),
            pointer(exact, c_int32),
            pointer(chosen, c_int32),
            pointer(displaced, c_double),
        )
    )
    return [
        Choice(
            [int(e) for e in exact[b] if e >= 0], {int(e) for e in chosen[b] if e >= 0}, float(displaced[b])
        )
        for b in range(n_rows)
    ]
