"""A Prometheus histogram whose observations another process has counted."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class _Series:
    """The buckets of one combination of label values."""

    def __init__(self, n_buckets: int) -> None:
        self.counts = [0] * n_buckets
        self.total = 0.0


class BucketHistogram(Collector):
    """A histogram that is fed whole buckets; prometheus_client's own takes single observations only.

    `add` and a scrape may be on different threads.
    """

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        labels: Mapping[str, Iterable[str]],
        registry: CollectorRegistry,
    ) -> None:
        """`bounds` are the upper ones, ascending, without infinity. `labels`: all values of each; all their
        combinations are exported from the start."""
        self._name = name
        self._text = text
        self._bounds = [*map(str, map(float, bounds)), "+Inf"]
        self._labels = list(labels)
        self._lock = threading.Lock()
        # guarded by _lock
        self._series = {values: _Series(len(self._bounds)) for values in product(*labels.values())}
        registry.register(self)

    def add(self, counts: Sequence[int], total: float, *values: str) -> None:
        """`counts` per bucket, not cumulative, [len(bounds) + 1]; `total`: sum of the observed values;
        `values` of the labels.

        Raises ValueError for another number of buckets and KeyError for unknown values, and adds nothing.
        """
        with self._lock:
            series = self._series[values]
            series.counts = [old + new for old, new in zip(series.counts, counts, strict=True)]
            series.total += total

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        with self._lock:
            for values, series in self._series.items():
                running = 0
                buckets = []
                for bound, count in zip(self._bounds, series.counts, strict=True):
                    running += count
                    buckets.append((bound, float(running)))
                family.add_metric(list(values), buckets=buckets, sum_value=series.total)
        return [family]

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Its name for the registry, which refuses a second series of the same one."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]
