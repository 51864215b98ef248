"""What speed a memory plan should give: an estimate from sizes and bandwidths."""

from __future__ import annotations

from dataclasses import dataclass

from s2moe.engine.plan import MemoryPlan

ROUTING_SKEW = 2.5
MEMORY_SHARES = (0.4, 0.9)
"""See expected_speed()."""


@dataclass(frozen=True)
class Machine:
    """What a short measurement found."""

    drive_bytes_per_second: float
    memory_bytes_per_second: float
    """Read by as many threads as will compute."""


@dataclass(frozen=True)
class Speed:
    """An estimate of decode speed in tokens per second, and the hit rates that it assumes."""

    low: float
    high: float
    low_hit_rate: float
    high_hit_rate: float


def expected_speed(plan: MemoryPlan, machine: Machine) -> Speed:
    """Bounds between which decoding one token at a time should lie; speculation and prompts are not in it.

        seconds = (dense bytes + bytes of one token's experts) / memory bandwidth
                  + (1 − hit rate) · bytes of one token's experts / drive bandwidth

    The low bound takes hit rate = s, the share of experts that fit, as if the router used all equally
    often; no overlap of reading and computing; and kernels that use 40 % of the measured memory bandwidth.
    The high bound takes hit rate = 1 − (1 − s)^2.5, which fits an LRU replayed on the routing of chat text
    (25 % of the experts: 56 %, 41 %: 74 %, 64 %: 91 %); reading and computing at the same time, so that the
    longer of the two counts; and 90 % of the memory bandwidth.
    """
    layout = plan.layout
    share = plan.resident_share
    hit_rates = (share, 1 - (1 - share) ** ROUTING_SKEW)
    token_bytes = plan.needs.weights_bytes + layout.cycle_bytes
    compute_seconds = [token_bytes / (part * machine.memory_bytes_per_second) for part in MEMORY_SHARES]
    read_seconds = [
        (1 - hit_rate) * layout.cycle_bytes / machine.drive_bytes_per_second if layout.cycle_bytes else 0.0
        for hit_rate in hit_rates
    ]
    return Speed(
        low=1 / (compute_seconds[0] + read_seconds[0]),
        high=1 / max(compute_seconds[1], read_seconds[1]),
        low_hit_rate=hit_rates[0],
        high_hit_rate=hit_rates[1],
    )
