"""ctypes binding of the expert store and cache of native/include/s2moe.h, in the manner of native.py."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from s2moe.engine.native import Library, Status, _Handle

Io = Literal["auto", "direct", "buffered"]
Reader = Literal["auto", "io_uring", "threads"]
Policy = Literal["cache", "static"]

N_PHASES = 2
N_TRIGGERS = 3
LOAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Upper bounds in seconds of S2MOE_LOAD_BUCKETS; `load_duration_counts` has one more, unbounded."""


class Phase(IntEnum):
    """enum s2moe_phase: index into what is counted by phase."""

    DECODE = 0
    PREFILL = 1


class Trigger(IntEnum):
    """enum s2moe_trigger: index into what is counted by trigger."""

    DEMAND = 0
    PREFETCH = 1
    WARMUP = 2


class Residency(IntEnum):
    """enum s2moe_residency: values of Experts.residency()."""

    ABSENT = 0
    IN_FLIGHT = 1
    RESIDENT = 2


class Priority(IntEnum):
    """enum s2moe_priority."""

    PREFETCH = 1
    WARMUP = 2


class ExpertStats(ctypes.Structure):
    """struct s2moe_expert_stats."""

    _fields_ = (
        ("hits", c_uint64 * N_PHASES),
        ("misses", c_uint64 * N_PHASES),
        ("prefetched", c_uint64 * N_PHASES),
        ("loads", c_uint64 * N_TRIGGERS),
        ("load_bytes", c_uint64 * N_TRIGGERS),
        ("load_duration_counts", c_uint64 * (len(LOAD_BUCKETS) + 1)),
        ("load_duration_seconds", c_double),
        ("read_seconds", c_double),
        ("stall_seconds", c_double * N_PHASES),
        ("compute_seconds", c_double * N_PHASES),
        ("evictions", c_uint64),
        ("prefetches_used", c_uint64),
        ("prefetches_late", c_uint64),
        ("prefetches_wasted", c_uint64),
        ("read_errors", c_uint64),
        ("resident_experts", c_uint64),
        ("resident_bytes", c_uint64),
        ("capacity_experts", c_uint64),
        ("capacity_bytes", c_uint64),
        ("touched_bytes", c_uint64),
    )
    hits: Sequence[int]
    misses: Sequence[int]
    prefetched: Sequence[int]
    loads: Sequence[int]
    load_bytes: Sequence[int]
    load_duration_counts: Sequence[int]
    load_duration_seconds: float
    read_seconds: float
    stall_seconds: Sequence[float]
    compute_seconds: Sequence[float]
    evictions: int
    prefetches_used: int
    prefetches_late: int
    prefetches_wasted: int
    read_errors: int
    resident_experts: int
    resident_bytes: int
    capacity_experts: int
    capacity_bytes: int
    touched_bytes: int


class SlotStats(ctypes.Structure):
    """struct s2moe_device_stats."""

    _fields_ = (
        ("hits", c_uint64 * N_PHASES),
        ("misses", c_uint64 * N_PHASES),
        ("prefetched", c_uint64 * N_PHASES),
        ("host_misses", c_uint64 * N_PHASES),
        ("promotions", c_uint64),
        ("demand_bytes", c_uint64 * N_PHASES),
        ("promoted_bytes", c_uint64),
        ("requests", c_uint64 * N_PHASES),
        ("wait_seconds", c_double * N_PHASES),
        ("copy_seconds", c_double * N_PHASES),
        ("synchronizations", c_uint64 * N_PHASES),
        ("evictions", c_uint64),
        ("resident_experts", c_uint64),
        ("resident_bytes", c_uint64),
        ("capacity_experts", c_uint64),
        ("capacity_bytes", c_uint64),
        ("pinned_bytes", c_uint64),
    )
    hits: Sequence[int]
    misses: Sequence[int]
    prefetched: Sequence[int]
    host_misses: Sequence[int]
    promotions: int
    demand_bytes: Sequence[int]
    promoted_bytes: int
    requests: Sequence[int]
    wait_seconds: Sequence[float]
    copy_seconds: Sequence[float]
    synchronizations: Sequence[int]
    evictions: int
    resident_experts: int
    resident_bytes: int
    capacity_experts: int
    capacity_bytes: int
    pinned_bytes: int


class ExpertId(ctypes.Structure):
    """struct s2moe_expert_id."""

    _fields_ = (("layer", c_int32), ("expert", c_int32))
    layer: int
    expert: int


class ExpertCosts(ctypes.Structure):
    """struct s2moe_expert_costs."""

    _fields_ = (
        ("hit_seconds", c_double),
        ("miss_seconds", c_double),
        ("bytes_per_second", c_double),
        ("queued_seconds", c_double),
    )
    hit_seconds: float
    miss_seconds: float
    bytes_per_second: float
    queued_seconds: float


class ExpertTrace(ctypes.Structure):
    """struct s2moe_expert_trace."""

    _fields_ = (
        ("begin_ns", c_int64),
        ("layer", c_int32),
        ("n_tokens", c_int32),
        ("n_hits", c_int32),
        ("n_misses", c_int32),
        ("missed_bytes", c_uint64),
        ("stall_seconds", c_double),
        ("compute_seconds", c_double),
    )
    begin_ns: int
    layer: int
    n_tokens: int
    n_hits: int
    n_misses: int
    missed_bytes: int
    stall_seconds: float
    compute_seconds: float


class ContextMemory(ctypes.Structure):
    """struct s2moe_memory."""

    _fields_ = (
        ("weights_bytes", c_uint64),
        ("kv_bytes", c_uint64),
        ("compute_bytes", c_uint64),
        ("gpu_weights_bytes", c_uint64),
        ("gpu_kv_bytes", c_uint64),
        ("gpu_compute_bytes", c_uint64),
    )
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    gpu_weights_bytes: int
    gpu_kv_bytes: int
    gpu_compute_bytes: int

    def share(self) -> None:
        """Counts what lies in the memory of a GPU as the machine's, which it is there."""
        self.weights_bytes += self.gpu_weights_bytes
        self.kv_bytes += self.gpu_kv_bytes
        self.compute_bytes += self.gpu_compute_bytes
        self.gpu_weights_bytes = self.gpu_kv_bytes = self.gpu_compute_bytes = 0


_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "s2moe_model_layout": (c_int32, [c_char_p, POINTER(c_void_p)]),
    "s2moe_experts_open": (c_void_p, [c_char_p, c_char_p, POINTER(c_int32)]),
    "s2moe_experts_free": (None, [c_void_p]),
    "s2moe_experts_overrides": (c_void_p, [c_void_p]),
    "s2moe_experts_allocate": (c_int32, [c_void_p, c_uint64]),
    "s2moe_experts_floor_bytes": (c_uint64, [c_void_p]),
    "s2moe_experts_shrink": (c_uint64, [c_void_p, c_uint64]),
    "s2moe_experts_grow": (c_uint64, [c_void_p, c_uint64]),
    "s2moe_experts_reader": (c_int32, [c_void_p, POINTER(c_void_p)]),
    "s2moe_experts_stats": (None, [c_void_p, POINTER(ExpertStats)]),
    "s2moe_experts_use_device": (c_int32, [c_void_p, c_void_p, c_char_p, c_uint64]),
    "s2moe_experts_device_floor_bytes": (c_uint64, [c_void_p]),
    "s2moe_experts_device": (c_int32, [c_void_p, POINTER(c_void_p)]),
    "s2moe_experts_device_stats": (None, [c_void_p, POINTER(SlotStats)]),
    "s2moe_experts_residency": (c_int32, [c_void_p, c_int32, POINTER(c_uint8), c_int32]),
    "s2moe_experts_prefetch": (c_int32, [c_void_p, POINTER(ExpertId), c_int32, c_int32, POINTER(c_int32)]),
    "s2moe_experts_cancel_prefetches": (c_int32, [c_void_p]),
    "s2moe_experts_pin": (c_int32, [c_void_p, POINTER(ExpertId), c_int32]),
    "s2moe_experts_costs": (None, [c_void_p, POINTER(ExpertCosts)]),
    "s2moe_experts_counts": (c_int32, [c_void_p, POINTER(c_uint64), c_int64]),
    "s2moe_experts_warm": (c_int32, [c_void_p, POINTER(c_uint64), c_int64]),
    "s2moe_experts_set_trace": (c_int32, [c_void_p, c_int64]),
    "s2moe_experts_take_trace": (c_int64, [c_void_p, POINTER(ExpertTrace), c_int64]),
    "s2moe_experts_measure": (c_int32, [c_void_p, c_uint64, POINTER(c_double)]),
    "s2moe_context_memory": (c_int32, [c_void_p, POINTER(ContextMemory)]),
    "s2moe_gpu_memory": (c_int32, [c_int32, POINTER(c_uint64), POINTER(c_uint64)]),
}


def model_layout(library: Library, path: Path | str) -> dict[str, Any]:
    """The headers of a model, as s2moe_model_layout() describes them; `path` is the first file.

    Raises NativeError with Status.IO.
    """
    library.declare(_PROTOTYPES)
    result = c_void_p()
    library.check(library._lib.s2moe_model_layout(str(path).encode(), byref(result)))
    layout: dict[str, Any] = json.loads(library.take_string(result))
    return layout


def context_memory(library: Library, context: Any) -> ContextMemory:
    """What a context and its model take; exact also for a model loaded with no_alloc."""
    library.declare(_PROTOTYPES)
    memory = ContextMemory()
    library.check(library._lib.s2moe_context_memory(context, byref(memory)))
    return memory


def gpu_memory(library: Library, index: int) -> tuple[int, int]:
    """Free and all bytes of a GPU, by llama.cpp's number. Raises NativeError with Status.UNSUPPORTED."""
    library.declare(_PROTOTYPES)
    free, total = c_uint64(), c_uint64()
    library.check(library._lib.s2moe_gpu_memory(index, byref(free), byref(total)))
    return free.value, total.value


class Experts(_Handle):
    """s2moe_experts: the store of one model file and the cache in front of it.

    `counts()` and `warm()` use int [n_layers][n_experts]: the layers of the layout in its order, and the
    experts of the largest of them. `residency`, `prefetch`, `cancel_prefetches`, `pin`, `stats`, `costs`,
    `reader` and `warm` may be called from any thread. Close it after the context and the model.
    """

    _free = "s2moe_experts_free"

    def __init__(
        self,
        library: Library,
        path: Path | str,
        *,
        io: Io = "auto",
        reader: Reader = "auto",
        queue_depth: int | None = None,
        policy: Policy = "cache",
    ) -> None:
        """Reads headers only. Raises NativeError with Status.IO, UNSUPPORTED or INVALID."""
        library.declare(_PROTOTYPES)
        options: dict[str, Any] = {"io": io, "reader": reader, "policy": policy}
        if queue_depth is not None:
            options["queue_depth"] = queue_depth
        status = c_int32()
        handle = library._lib.s2moe_experts_open(
            str(path).encode(), json.dumps(options).encode(), byref(status)
        )
        super().__init__(library, handle, Status(status.value))
        self.layout: dict[str, Any] = model_layout(library, path)
        """What the headers said when the store was opened."""
        layers = self.layout["layers"]
        self.layers: tuple[int, ...] = tuple(layer["layer"] for layer in layers)
        """The model's numbers of the layers that have experts, in the layout's order."""
        self._n_experts_of: dict[int, int] = {layer["layer"]: layer["n_expert"] for layer in layers}
        self.n_experts: int = max(self._n_experts_of.values())
        """Experts of the largest layer."""
        sizes = [layer["expert_bytes"] for layer in layers]
        self.expert_file_bytes: tuple[int, int] = (min(sizes), max(sizes))
        """Of one expert in the file: the smallest and the largest."""
        self.device: dict[str, Any] | None = None
        """Slots of a GPU: "device", "unified", "watchdog", "pinned", "reason"; None = there are none."""

    # memory

    @property
    def overrides(self) -> c_void_p:
        """The value of llama_model_params.tensor_buft_overrides."""
        return c_void_p(self._lib.s2moe_experts_overrides(self.handle))

    @property
    def floor_bytes(self) -> int:
        value: int = self._lib.s2moe_experts_floor_bytes(self.handle)
        return value

    def allocate(self, capacity_bytes: int) -> None:
        """Not during a decode. Raises NativeError with Status.INVALID (below the floor) or NO_MEMORY."""
        self._library.check(self._lib.s2moe_experts_allocate(self.handle, capacity_bytes))

    def shrink(self, capacity_bytes: int) -> int:
        """Returns the bytes that the slots take then. Not during a decode."""
        value: int = self._lib.s2moe_experts_shrink(self.handle, capacity_bytes)
        return value

    def grow(self, capacity_bytes: int) -> int:
        """Takes back what shrink() gave up; returns the bytes that slots take then. Not during a decode."""
        value: int = self._lib.s2moe_experts_grow(self.handle, capacity_bytes)
        return value

    # slots of a GPU

    @property
    def device_floor_bytes(self) -> int:
        """The least capacity for use_device()."""
        value: int = self._lib.s2moe_experts_device_floor_bytes(self.handle)
        return value

    def use_device(self, context: Any, device: str, capacity_bytes: int) -> None:
        """Has experts computed from slots in the memory of `device` ("cuda:0"), fed by the cache. After
        allocate(), before the context's first decode.

        Raises NativeError with Status.INVALID, UNSUPPORTED or NO_MEMORY.
        """
        self._library.check(
            self._lib.s2moe_experts_use_device(self.handle, context, device.encode(), capacity_bytes)
        )
        result = c_void_p()
        self._library.check(self._lib.s2moe_experts_device(self.handle, byref(result)))
        self.device = json.loads(self._library.take_string(result))

    def slot_stats(self) -> SlotStats | None:
        """None: there are no slots of a GPU."""
        if self.device is None:
            return None
        stats = SlotStats()
        self._lib.s2moe_experts_device_stats(self.handle, byref(stats))
        return stats

    # reads

    def reader(self) -> dict[str, Any]:
        """How experts are read: "io", "reader", "queue_depth", "reason"."""
        result = c_void_p()
        self._library.check(self._lib.s2moe_experts_reader(self.handle, byref(result)))
        reader: dict[str, Any] = json.loads(self._library.take_string(result))
        return reader

    def measure(self, n_bytes: int) -> float:
        """Bytes per second of reading experts at random. Raises NativeError with Status.IO."""
        bytes_per_second = c_double()
        self._library.check(self._lib.s2moe_experts_measure(self.handle, n_bytes, byref(bytes_per_second)))
        return bytes_per_second.value

    # residency

    def residency(self, layer: int) -> bytes:
        """One Residency per expert of a layer of the model, [n_experts of the layer]. Raises NativeError."""
        n_experts = self._n_experts_of.get(layer, 0)
        mask = (c_uint8 * n_experts)()
        self._library.check(self._lib.s2moe_experts_residency(self.handle, layer, mask, n_experts))
        return bytes(mask)

    def prefetch(self, ids: Iterable[tuple[int, int]], priority: Priority = Priority.PREFETCH) -> int:
        """Asks for (layer, expert) pairs, the most urgent first; returns how many have a slot now.

        Raises NativeError with Status.INVALID when one is out of range; nothing is queued then.
        """
        array = _id_array(ids)
        n_queued = c_int32()
        self._library.check(
            self._lib.s2moe_experts_prefetch(self.handle, array, len(array), priority, byref(n_queued))
        )
        return n_queued.value

    def cancel_prefetches(self) -> int:
        """Returns how many experts were dropped from the queue."""
        value: int = self._lib.s2moe_experts_cancel_prefetches(self.handle)
        return value

    def pin(self, ids: Iterable[tuple[int, int]]) -> None:
        """Replaces the pinned set of (layer, expert) pairs. Raises NativeError with Status.INVALID."""
        array = _id_array(ids)
        self._library.check(self._lib.s2moe_experts_pin(self.handle, array, len(array)))

    # accounting

    def stats(self) -> ExpertStats:
        stats = ExpertStats()
        self._lib.s2moe_experts_stats(self.handle, byref(stats))
        return stats

    def costs(self) -> ExpertCosts:
        costs = ExpertCosts()
        self._lib.s2moe_experts_costs(self.handle, byref(costs))
        return costs

    def counts(self) -> list[list[int]]:
        """How often decode used each expert, [n_layers][n_experts]."""
        n_rows, n_columns = len(self.layers), self.n_experts
        counts = (c_uint64 * (n_rows * n_columns))()
        self._library.check(self._lib.s2moe_experts_counts(self.handle, counts, len(counts)))
        return [list(counts[row * n_columns : (row + 1) * n_columns]) for row in range(n_rows)]

    def warm(self, counts: Sequence[Sequence[int]]) -> None:
        """Fills empty slots in the background, [n_layers][n_experts], the most used first.

        Raises NativeError with Status.INVALID for another shape.
        """
        flat = [count for row in counts for count in row]
        array = (c_uint64 * len(flat))(*flat)
        self._library.check(self._lib.s2moe_experts_warm(self.handle, array, len(array)))

    # trace

    def set_trace(self, n_max: int) -> None:
        self._library.check(self._lib.s2moe_experts_set_trace(self.handle, n_max))

    def take_trace(self, n_max: int) -> list[ExpertTrace]:
        """Up to n_max records, oldest first; they are then forgotten. Not during a decode."""
        records = (ExpertTrace * n_max)()
        count = self._lib.s2moe_experts_take_trace(self.handle, records, n_max)
        return list(records[:count])


def _id_array(ids: Iterable[tuple[int, int]]) -> ctypes.Array[ExpertId]:
    pairs = [ExpertId(layer, expert) for layer, expert in ids]
    return (ExpertId * len(pairs))(*pairs)
