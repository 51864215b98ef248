"""What speculation a server and a request ask for, what a model allows, and what came of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from s2moe.engine.errors import RequestError
from s2moe.engine.messages import Speculation, SpeculationReport
from s2moe.engine.native import Library
from s2moe.engine.native_speculation import N_VERIFY_ROWS, speculator_limits

logger = logging.getLogger(__name__)

OFF: Final = "off"
DEFAULT_METHOD: Final = "s2moe"
EXPERT_SKIP: Final = "expert-skip"
UNSUPPORTED: Final = "unsupported"

_CHOSEN_BY_PRESET: Final = ("error_budget", "reuse_strength", "single_token_bias", "reuse_cap")


def merge(server: Speculation, request: Speculation) -> dict[str, Any]:
    """The options of s2moe_speculator_begin() for a request: its own values, else the server's; what both
    leave open is left out, but for "method".

    A request that names a preset gets that preset, not the server's `exact` or the single values which the
    server was given in place of its own preset's.
    """
    options = _given(server)
    if request.preset is not None:
        for name in ("exact", *_CHOSEN_BY_PRESET):
            options.pop(name, None)
    options |= _given(request)
    options.setdefault("method", DEFAULT_METHOD)
    return options


def _given(speculation: Speculation) -> dict[str, Any]:
    return {
        name: value
        for name in speculation.__struct_fields__
        if (value := getattr(speculation, name)) is not None
    }


def has_own_context(options: Mapping[str, Any]) -> bool:
    """Whether drafts have a KV cache of their own."""
    return options.get("method") == EXPERT_SKIP or options.get("shared_context") is False


@dataclass(frozen=True)
class SpeculationSupport:
    """What a server can do for its requests."""

    asked: Speculation
    """What it was started with."""
    is_possible: bool
    """Whether its model can be drafted for; False also if that was not asked for."""
    limit: str = ""
    """Why drafts are not possible, or only in part; empty if they are, or are not asked for."""
    preset: str = ""
    """What requests get that do not say otherwise, as the library names it; empty: nothing is drafted."""

    @property
    def options(self) -> dict[str, Any]:
        """Of a request that asks for nothing."""
        return merge(self.asked, Speculation())

    @property
    def method(self) -> str:
        """What requests get that do not say otherwise."""
        method: str = self.options["method"]
        return method if self.is_possible else OFF

    @property
    def has_draft_context(self) -> bool:
        return self.is_possible and has_own_context(self.options)

    @classmethod
    def of_model(cls, library: Library, handle: Any, asked: Speculation, n_batch: int) -> SpeculationSupport:
        """`handle`: a model, which may be loaded with no_alloc; `n_batch`: tokens of one micro-batch."""
        if merge(asked, Speculation())["method"] == OFF:
            return cls(asked, is_possible=False)
        limits = speculator_limits(library, handle)
        if limits.method != OFF and n_batch < N_VERIFY_ROWS:
            limit = f"up to {N_VERIFY_ROWS} tokens are verified at once, but --batch-size is {n_batch}"
            return cls(asked, is_possible=False, limit=limit)
        return cls(asked, is_possible=limits.method != OFF, limit=limits.reason)

    def check(self, options: Mapping[str, Any]) -> None:
        """Raises RequestError when a request asks for what the server was not started for.

        That the model forbids it is no error: such requests are answered without drafts.
        """
        method = options["method"]
        if method == OFF:
            return
        if self.options["method"] == OFF:
            raise RequestError(
                "invalid_value",
                f"the server was started with --speculation off; start it with --speculation {method} to use "
                f"{method}",
                param="s2moe.speculation",
            )
        if not self.is_possible or self.has_draft_context or not has_own_context(options):
            return
        if method == EXPERT_SKIP:
            raise RequestError(
                "invalid_value",
                "expert-skip drafts with a KV cache of its own, for which this server has set no memory "
                "aside; start it with --speculation expert-skip or with --no-shared-context",
                param="s2moe.speculation",
            )
        raise RequestError(
            "invalid_value",
            "drafts without the shared context need a KV cache of their own, which this server has set no "
            "memory aside for; start it with --no-shared-context or with --speculation expert-skip",
            param="s2moe.shared_context",
        )

    def describe(self) -> str:
        """One line for the log."""
        if self.options["method"] == OFF:
            return "speculation is off, as --speculation says"
        if not self.is_possible:
            return f"speculation is off: {self.limit}"
        kv_cache = "in a KV cache of their own" if self.has_draft_context else "on the shared KV cache"
        why = f"; limited: {self.limit}" if self.limit else ""
        return f"speculation is {self.method}, preset {self.preset}: drafts {kv_cache}{why}"


def refused(message: str) -> RequestError:
    """The error for options that s2moe_speculator_begin() refused; its `message` begins with the key."""
    key = message.partition(" ")[0].rstrip(":")
    if key == "method":
        return RequestError("invalid_value", message, param="s2moe.speculation")
    param = f"s2moe.{key}" if key in Speculation.__struct_fields__ else "s2moe"
    return RequestError("invalid_value", message, param=param)


def report_to_wire(
    report: Mapping[str, Any], before: Mapping[str, Any] | None = None
) -> SpeculationReport | None:
    """`report`: of s2moe_speculator_report(); `before`: the one at the beginning of the same request, since
    pauses and probes are counted over all requests. Keys that the wire does not know, and values for which
    JSON has none (null), are passed over; None, with a warning, when the rest is not a report."""
    controller = report.get("controller") or {}
    earlier = (before or {}).get("controller") or {}
    costs = report.get("costs") or {}
    flat = {
        **report,
        "controller_state": controller.get("state"),
        "is_paced": controller.get("is_paced"),
        "n_pauses": _increase(controller, earlier, "n_pauses"),
        "n_probes": _increase(controller, earlier, "n_probes"),
        "draft_length": controller.get("draft_length"),
        "verify_fit": _without_null(costs.get("verify") or {}),
        "draft_fit": _without_null(costs.get("draft") or {}),
        "single_seconds": costs.get("single_seconds"),
    }
    try:
        return msgspec.convert(_without_null(flat), SpeculationReport)
    except msgspec.ValidationError as error:
        logger.warning("the report of a response's speculation is not understood: %s", error)
        return None


def _increase(values: Mapping[str, Any], before: Mapping[str, Any], name: str) -> Any:
    value, earlier = values.get(name), before.get(name)
    return value - earlier if isinstance(value, int) and isinstance(earlier, int) else value


def _without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
