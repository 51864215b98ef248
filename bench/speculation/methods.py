"""The methods that are compared, and which server can run each of them.

A server runs several methods, which requests choose by their field `s2moe`. What needs a context of its
own for drafts, or another policy of the expert cache, needs another server. Each pair of answers comes
from one server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

STATIC: Final = "static"
SERVERS: Final[dict[str, tuple[str, ...]]] = {
    "shared": (),
    "independent": ("--no-shared-context",),
    STATIC: ("--expert-policy", "static"),
}
"""Flags beside those that all servers get. `independent`: with a second context, which its memory plan
counts. `static`: with --hot-experts beside, which the benchmark has `s2moe profile` write."""

OFF: Final = "off"
OFF_OPTIONS: Final[dict[str, Any]] = {"speculation": "off"}
PRESETS: Final = ("exact", "balanced", "fast")
ABLATIONS: Final = ("no-adaptive", "no-single-token-bias", "no-reuse-gating", "no-shared-context")
"""Each is `balanced` less one component."""
BUDGETS: Final = ("budget-0.02", "budget-0.1")
"""`balanced` with other error budgets, for the curve of speed against agreement."""

_BUDGET: Final = re.compile(r"budget-(0(?:\.\d+)?|1(?:\.0+)?)")


class MethodError(Exception):
    """A name that is no method; the message lists what there is."""


@dataclass(frozen=True)
class Method:
    name: str
    options: dict[str, Any]
    """The request's field `s2moe`."""
    server: str = "shared"
    """Key of SERVERS."""
    keeps_text: bool = False
    """Its text must be that of plain decoding."""


def _s2moe(preset: str, **options: Any) -> dict[str, Any]:
    return {"speculation": "s2moe", "preset": preset, **options}


METHODS: Final = {
    method.name: method
    for method in (
        Method("control", OFF_OPTIONS, keeps_text=True),
        Method("expert-skip", {"speculation": "expert-skip", "preset": "exact"}, "independent"),
        Method("cascade", {"speculation": "cascade", "preset": "exact"}, keeps_text=True),
        Method("exact", _s2moe("exact"), keeps_text=True),
        Method("balanced", _s2moe("balanced")),
        Method("fast", _s2moe("fast")),
        Method("no-adaptive", _s2moe("balanced", adaptive=False)),
        Method("no-single-token-bias", _s2moe("balanced", single_token_bias=False)),
        Method("no-reuse-gating", _s2moe("balanced", reuse_gating=False), keeps_text=True),
        Method("no-shared-context", _s2moe("balanced", shared_context=False), "independent"),
        Method("static", _s2moe("balanced"), STATIC),
    )
}
"""Beside `off`, with which each is paired. `control` is off itself: what it differs from 1 by is noise.
The baselines expert-skip and cascade verify without gating; the batches of expert-skip are wider than those
that kernels compute as single rows, so that near-ties may fall otherwise."""


def method_named(name: str) -> Method:
    """One of METHODS, or `budget-0.07`: balanced with that error budget. Raises MethodError."""
    if name in METHODS:
        return METHODS[name]
    budget = _BUDGET.fullmatch(name)
    if budget is None:
        known = ", ".join((OFF, *METHODS, "budget-X (0 ≤ X ≤ 1)"))
        raise MethodError(f"{name[:40]!r} is not a method; choose from {known}")
    return Method(name, _s2moe("balanced", error_budget=float(budget[1])))
