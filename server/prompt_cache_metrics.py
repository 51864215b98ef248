"""The Prometheus series of the prompt cache."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from s2moe.engine.messages import EngineStats

EVENTS = ("saved", "restored", "evicted", "loaded", "failed")
INVALIDATION_REASONS = ("prefix_changed", "not_cuttable", "evicted", "model_reload")

_ENGINE_REASONS = ("prefix_changed", "not_cuttable", "evicted")
"""Those that the engine reports, as events."""


class PromptCacheMetrics:
    """Adds up what the engine reports. All methods are called on the event loop."""

    def __init__(self, namespace: str, registry: CollectorRegistry) -> None:
        self._entries = Gauge(
            "prompt_cache_entries",
            "Conversations kept in memory beside the one in the KV cache",
            namespace=namespace,
            registry=registry,
        )
        self._bytes = Gauge(
            "prompt_cache_bytes", "Memory that they take", namespace=namespace, registry=registry
        )
        self._events = Counter(
            "prompt_cache_events_total",
            "Conversations saved to memory, restored from it, evicted, loaded from files; files that failed",
            ("event",),
            namespace=namespace,
            registry=registry,
        )
        for event in EVENTS:
            self._events.labels(event)
        self._invalidations = Counter(
            "prompt_cache_invalidations_total",
            "Times that something evaluated was given up",
            ("reason",),
            namespace=namespace,
            registry=registry,
        )
        for reason in INVALIDATION_REASONS:
            self._invalidations.labels(reason)
        self._has_content = False

    def on_stats(self, stats: EngineStats) -> None:
        self._entries.set(stats.prompt_cache_entries)
        self._bytes.set(stats.prompt_cache_bytes)
        self._has_content = stats.prompt_cache_entries > 0 or stats.kv_cache_tokens > 0
        for name, count in stats.prompt_cache_events.items():
            if name in EVENTS:
                self._events.labels(name).inc(count)
            if name in _ENGINE_REASONS:
                self._invalidations.labels(name).inc(count)

    def on_engine_gone(self) -> None:
        """Whatever it had evaluated is gone; counters stay."""
        self._entries.set(0)
        self._bytes.set(0)
        if self._has_content:
            self._invalidations.labels("model_reload").inc()
        self._has_content = False
