"""The Prometheus series of the expert cache and of the memory that the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge

from s2moe.engine.messages import (
    LOAD_DURATION_BOUNDS_SECONDS,
    EngineStats,
    ExpertActivity,
    ExpertCache,
    ExpertLoads,
    ExpertPhase,
    GpuActivity,
    GpuPhase,
)
from s2moe.server.bucket_histogram import BucketHistogram

LOOKUP_RESULTS = ("hit", "miss", "prefetched")
PHASES = ("prefill", "decode")
LOAD_SOURCES = ("disk", "host")
LOAD_TRIGGERS = ("demand", "prefetch", "warmup")
EVICTION_POLICIES = ("decayed_frequency",)
PREFETCH_OUTCOMES = ("used", "late", "wasted")
TIERS = ("gpu", "pinned", "pageable")
MEMORY_POOLS = ("weights", "kv", "compute", "expert_cache", "prompt_cache", "processes", "reserve")
MEMORY_DEVICES = ("host",)
PRESSURE_ACTIONS = ("drop_prompt_cache", "shrink_cache", "grow_cache")

_DISK, _COPIED = LOAD_SOURCES
_GPU = TIERS[0]
_HOST = MEMORY_DEVICES[0]


class ExpertMetrics:
    """Adds up what the engine reports. All methods are called on the event loop."""

    def __init__(self, namespace: str, registry: CollectorRegistry) -> None:
        self._namespace = namespace
        self._registry = registry
        self._build_cache()
        self._build_gpu()
        self._build_memory()

    def _build_cache(self) -> None:
        self._lookups = self._counter(
            "expert_cache_lookups_total",
            "Experts that a layer needed; prefetched = resident or on its way because of a prefetch",
            {"result": LOOKUP_RESULTS, "phase": PHASES},
        )
        by_trigger = {"source": LOAD_SOURCES, "trigger": LOAD_TRIGGERS}
        self._loads = self._counter(
            "expert_cache_loads_total",
            "Experts read from the disk, or copied from the host's memory into a GPU's slots",
            by_trigger,
        )
        self._load_bytes = self._counter(
            "expert_cache_load_bytes_total", "Bytes of experts read or copied", by_trigger
        )
        self._load_duration = BucketHistogram(
            f"{self._namespace}_expert_cache_load_duration_seconds",
            "From the request for an expert to its last byte",
            LOAD_DURATION_BOUNDS_SECONDS,
            {"source": (_DISK,)},
            self._registry,
        )
        self._read_seconds = self._counter(
            "expert_cache_read_seconds_total", "Time during which at least one read was in flight"
        )
        self._stall_seconds = self._counter(
            "expert_cache_stall_seconds_total", "Time that computing waited for reads", {"phase": PHASES}
        )
        self._compute_seconds = self._counter(
            "expert_cache_compute_seconds_total",
            "Time in the matrices of experts, waits taken off",
            {"phase": PHASES},
        )
        self._evictions = self._counter(
            "expert_cache_evictions_total", "Experts evicted", {"policy": EVICTION_POLICIES}
        )
        self._prefetches = self._counter(
            "expert_cache_prefetches_total",
            "Experts read ahead: used in time, still on their way when needed, or evicted without use",
            {"outcome": PREFETCH_OUTCOMES},
        )
        self._read_errors = self._counter("expert_cache_read_errors_total", "Reads of experts that failed")
        tier = {"tier": TIERS}
        self._gauges = {
            "resident_experts": self._gauge("expert_cache_resident_experts", "Experts in slots", tier),
            "capacity_experts": self._gauge("expert_cache_capacity_experts", "Slots for experts", tier),
            "resident_bytes": self._gauge(
                "expert_cache_resident_bytes", "Bytes of slots that hold an expert", tier
            ),
            "capacity_bytes": self._gauge("expert_cache_capacity_bytes", "Bytes of all slots", tier),
        }
        self._info = Gauge(
            "expert_cache_info",
            "How experts are read, and why not in the preferred way; 1 once it is known",
            ("io", "reader", "reason"),
            namespace=self._namespace,
            registry=self._registry,
        )
        self._info_shown: tuple[str, str, str] | None = None

    def _build_gpu(self) -> None:
        by_phase = {"phase": PHASES}
        self._gpu_evictions = self._counter(
            "gpu_slot_evictions_total", "Experts evicted from the slots of a GPU"
        )
        self._gpu_demand_bytes = self._counter(
            "gpu_demand_bytes_total", "Bytes of experts copied into slots while a GPU waited", by_phase
        )
        self._gpu_requests = self._counter(
            "gpu_host_requests_total",
            "Layers for which a GPU waited until the host had fetched experts",
            by_phase,
        )
        self._gpu_copy_seconds = self._counter(
            "gpu_copy_seconds_total", "Time that a GPU took for gpu_demand_bytes_total", by_phase
        )
        self._gpu_synchronizations = self._counter(
            "gpu_synchronizations_total",
            "Times that the host waited for a GPU: inputs, results, the tables of slots, the gate",
            by_phase,
        )

    def _build_memory(self) -> None:
        by_pool = {"pool": MEMORY_POOLS, "device": MEMORY_DEVICES}
        self._memory_budget = self._gauge(
            "memory_budget_bytes", "Memory planned for a purpose at the engine's start", by_pool
        )
        self._memory_used = self._gauge("memory_used_bytes", "Memory taken for a purpose", by_pool)
        device = {"device": MEMORY_DEVICES}
        self._memory_available = self._gauge(
            "memory_available_bytes", "Memory that may still be taken without swapping; 0 = not known", device
        )
        self._memory_total = self._gauge(
            "memory_total_bytes", "Memory of the machine or of the container; 0 = not known", device
        )
        self._pressure = self._counter(
            "memory_pressure_events_total",
            "Times that memory ran short, by what was done",
            {"action": PRESSURE_ACTIONS},
        )

    def on_stats(self, stats: EngineStats) -> None:
        if stats.experts is not None:
            self._add_activity(stats.experts)
        if stats.expert_cache is not None:
            self._show_cache(stats.expert_cache)
        for pool in stats.memory_pools:
            if pool.pool in MEMORY_POOLS:
                self._memory_budget.labels(pool.pool, _HOST).set(pool.budget_bytes)
                self._memory_used.labels(pool.pool, _HOST).set(pool.used_bytes)
        self._memory_available.labels(_HOST).set(stats.memory_available_bytes)
        self._memory_total.labels(_HOST).set(stats.memory_total_bytes)
        for action, count in stats.memory_pressure_events.items():
            if action in PRESSURE_ACTIONS:
                self._pressure.labels(action).inc(count)

    def on_engine_gone(self) -> None:
        """What the engine held is free again; counters stay."""
        for gauge, tier in product(self._gauges.values(), TIERS):
            gauge.labels(tier).set(0)
        for pool in MEMORY_POOLS:
            self._memory_used.labels(pool, _HOST).set(0)

    def _add_activity(self, activity: ExpertActivity) -> None:
        self._add_phase("prefill", activity.prefill)
        self._add_phase("decode", activity.decode)
        for trigger in LOAD_TRIGGERS:
            loads = getattr(activity, trigger)
            self._loads.labels(_DISK, trigger).inc(loads.n_loads)
            self._load_bytes.labels(_DISK, trigger).inc(loads.n_bytes)
        if activity.load_duration_counts:
            self._load_duration.add(activity.load_duration_counts, activity.load_duration_seconds, _DISK)
        self._read_seconds.inc(activity.read_seconds)
        self._evictions.labels(EVICTION_POLICIES[0]).inc(activity.evictions)
        self._prefetches.labels("used").inc(activity.prefetches_used)
        self._prefetches.labels("late").inc(activity.prefetches_late)
        self._prefetches.labels("wasted").inc(activity.prefetches_wasted)
        self._read_errors.inc(activity.read_errors)
        self._add_gpu(activity.gpu)

    def _add_gpu(self, activity: GpuActivity) -> None:
        self._add_copies("prefetch", activity.prefetch)
        self._gpu_evictions.inc(activity.evictions)
        for phase in PHASES:
            share: GpuPhase = getattr(activity, phase)
            self._add_copies("demand", share.demand)
            self._gpu_demand_bytes.labels(phase).inc(share.demand.n_bytes)
            self._gpu_requests.labels(phase).inc(share.requests)
            self._gpu_copy_seconds.labels(phase).inc(share.copy_seconds)
            self._gpu_synchronizations.labels(phase).inc(share.synchronizations)

    def _add_copies(self, trigger: str, loads: ExpertLoads) -> None:
        self._loads.labels(_COPIED, trigger).inc(loads.n_loads)
        self._load_bytes.labels(_COPIED, trigger).inc(loads.n_bytes)

    def _add_phase(self, phase: str, activity: ExpertPhase) -> None:
        self._lookups.labels("hit", phase).inc(activity.hits)
        self._lookups.labels("miss", phase).inc(activity.misses)
        self._lookups.labels("prefetched", phase).inc(activity.prefetched)
        self._stall_seconds.labels(phase).inc(activity.stall_seconds)
        # a difference of two clocks, which may come out a little below zero
        self._compute_seconds.labels(phase).inc(max(0.0, activity.compute_seconds))

    def _show_cache(self, cache: ExpertCache) -> None:
        for name, gauge in self._gauges.items():
            gauge.labels(cache.tier if cache.tier in TIERS else TIERS[-1]).set(getattr(cache, name))
            gauge.labels(_GPU).set(0 if cache.gpu is None else getattr(cache.gpu, name))
        info = (cache.io, cache.reader, cache.reason)
        if info != self._info_shown:
            self._info_shown = info
            self._info.clear()
            self._info.labels(*info).set(1)

    def _counter(self, name: str, text: str, labels: Mapping[str, tuple[str, ...]] | None = None) -> Counter:
        labels = labels or {}
        counter = Counter(name, text, tuple(labels), namespace=self._namespace, registry=self._registry)
        if labels:
            for values in product(*labels.values()):
                counter.labels(*values)
        return counter

    def _gauge(self, name: str, text: str, labels: Mapping[str, tuple[str, ...]]) -> Gauge:
        gauge = Gauge(name, text, tuple(labels), namespace=self._namespace, registry=self._registry)
        for values in product(*labels.values()):
            gauge.labels(*values)
        return gauge
