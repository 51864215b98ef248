"""The front end alone, measured in small: speed of a stream, time of an event, cost of silence."""

from __future__ import annotations

import statistics

from s2moe.bench import front_end_speed as speed

TRIES = 3
"""Other work on the machine may spoil one."""


async def test_one_stream_takes_10_000_events_per_second() -> None:
    async with speed.front_end(None) as port:
        rates, _ = await speed.burst_rates(speed.Client(port, None), 5_000, TRIES)
    assert max(rates) >= speed.EVENTS_PER_SECOND


async def test_an_event_is_with_the_client_at_once() -> None:
    medians = []
    async with speed.front_end(None) as port:
        client = speed.Client(port, None)
        for _ in range(TRIES):
            latencies = (await client.read("paced 200 0.002"))["latencies_ms"]
            assert len(latencies) == 200
            medians.append(statistics.median(latencies))
    assert min(medians) < speed.EVENT_MS


async def test_silent_streams_cost_nothing() -> None:
    seconds, shares = 2.0, []
    async with speed.front_end(None) as port:
        for _ in range(TRIES):
            without = await speed.idle_cpu_seconds(seconds)
            async with speed.Client(port, None).holding(speed.N_IDLE_STREAMS):
                held = await speed.idle_cpu_seconds(seconds)
            shares.append((held - without) / seconds)
    assert min(shares) < speed.IDLE_CPU_SHARE
