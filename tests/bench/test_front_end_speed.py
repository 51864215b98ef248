"""The front end alone, measured in small: speed of a stream, time of an event, cost of silence."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator

import pytest

from s2moe.bench import front_end_speed as speed

TRIES = 3
"""Other work on the machine may spoil one."""


@pytest.fixture
def other_cpu() -> Iterator[int | None]:
    """Where engine and client run: the front end has one core for itself, as in the benchmark."""
    before = os.sched_getaffinity(0)
    own, other = speed.choose_cpus()
    if own is not None:
        os.sched_setaffinity(0, {own})
    yield other
    os.sched_setaffinity(0, before)


async def test_one_stream_takes_10_000_events_per_second(other_cpu: int | None) -> None:
    async with speed.front_end(other_cpu) as port:
        rates, _ = await speed.burst_rates(speed.Client(port, other_cpu), 20_000, TRIES)
    assert max(rates) >= speed.EVENTS_PER_SECOND


async def test_an_event_is_with_the_client_at_once(other_cpu: int | None) -> None:
    medians = []
    async with speed.front_end(other_cpu) as port:
        client = speed.Client(port, other_cpu)
        for _ in range(TRIES):
            latencies = (await client.read("paced 200 0.002"))["latencies_ms"]
            assert len(latencies) == 200
            medians.append(statistics.median(latencies))
    assert min(medians) < speed.EVENT_MS


async def test_silent_streams_cost_nothing(other_cpu: int | None) -> None:
    seconds, shares = 2.0, []
    async with speed.front_end(other_cpu) as port:
        for _ in range(TRIES):
            without = await speed.idle_cpu_seconds(seconds)
            async with speed.Client(port, other_cpu).holding(speed.N_IDLE_STREAMS):
                held = await speed.idle_cpu_seconds(seconds)
            shares.append((held - without) / seconds)
    assert min(shares) < speed.IDLE_CPU_SHARE
