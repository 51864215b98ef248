"""What the engine's prompt cache does, as /metrics shows it."""

from __future__ import annotations

from server_rig import ServerRig

from s2moe.engine.messages import EngineStats
from s2moe.server import prompt_cache_metrics as names
from s2moe.server.engine_client import EngineState


async def test_every_label_value_exists_at_zero(rig: ServerRig) -> None:
    for event in ("saved", "restored", "evicted", "loaded", "failed"):
        assert await rig.sample("s2moe_prompt_cache_events_total", event=event) == 0
    for reason in names.INVALIDATION_REASONS:
        assert await rig.sample("s2moe_prompt_cache_invalidations_total", reason=reason) == 0
    assert await rig.sample("s2moe_prompt_cache_entries") == 0
    assert await rig.sample("s2moe_prompt_cache_bytes") == 0


async def test_events_add_up_and_gauges_follow(rig: ServerRig) -> None:
    events = {"saved": 2, "evicted": 1, "prefix_changed": 3, "of-a-later-engine": 1}
    for entries in (2, 1):
        rig.metrics.on_stats(
            EngineStats(
                prompt_cache_entries=entries, prompt_cache_bytes=100 * entries, prompt_cache_events=events
            )
        )
    assert await rig.sample("s2moe_prompt_cache_entries") == 1
    assert await rig.sample("s2moe_prompt_cache_bytes") == 100
    assert await rig.sample("s2moe_prompt_cache_events_total", event="saved") == 4
    assert await rig.sample("s2moe_prompt_cache_events_total", event="evicted") == 2
    assert await rig.sample("s2moe_prompt_cache_invalidations_total", reason="evicted") == 2
    assert await rig.sample("s2moe_prompt_cache_invalidations_total", reason="prefix_changed") == 6


async def test_engine_that_goes_takes_what_it_had_evaluated(rig: ServerRig) -> None:
    rig.metrics.on_stats(EngineStats(prompt_cache_entries=1, prompt_cache_bytes=100, kv_cache_tokens=5))
    for _ in range(2):
        rig.metrics.on_state(EngineState.RESTARTING)
    assert await rig.sample("s2moe_prompt_cache_entries") == 0
    assert await rig.sample("s2moe_prompt_cache_bytes") == 0
    assert await rig.sample("s2moe_prompt_cache_invalidations_total", reason="model_reload") == 1
