"""Faults under a running model, each a function of its own in a process of its own.

    python fault_cases.py CASE MODEL READER IO

MODEL is a copy that the case may damage. The process has fault_shim.c preloaded. It exits 0 when all went as
it should; an exception, or a signal, is what the test reports.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from s2moe.engine.native import NativeError, Status
from s2moe.engine.native_experts import Io, Reader, Residency

from fault_control import Faults
from stored_model import PROMPT, Layout, StoredModel, Transcript, transcribe


class Scene:
    """A served model, what it says when all is well, and the faults to arm."""

    def __init__(self, path: Path, reader: Reader, io: Io) -> None:
        self.path = path
        self.faults = Faults.shared()
        with StoredModel(path, io="buffered", reader="threads") as healthy:
            self.expected: Transcript = transcribe(healthy)
        self.model = StoredModel(path, reader=reader, io=io)
        self._reader = reader
        self._exchanged: dict[int, int] = {}

    def close(self) -> None:
        self.model.close()

    def fail_reads(self, n_spared: int = 0) -> None:
        """Reads after the next `n_spared` fail: with EIO, or, by io_uring, all at once with EBADF."""
        if self._reader == "threads":
            self.faults.fail_reads(n_spared)
            return
        entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        for descriptor in [int(entry.name) for entry in entries if entry.readlink() == self.path]:
            self._exchanged[descriptor] = os.dup(descriptor)
            write_only = os.open(self.path, os.O_WRONLY)
            os.dup2(write_only, descriptor)
            os.close(write_only)
        require(bool(self._exchanged), "the store has no open descriptor of its file")

    def heal(self) -> None:
        self.faults.clear()
        for descriptor, original in self._exchanged.items():
            os.dup2(original, descriptor)
            os.close(original)
        self._exchanged.clear()

    def refuse(self, status: Status, tokens: list[int], position: int) -> NativeError:
        """Decodes; returns the error, which must have this status and leave the KV cache as it was."""
        n_kv = self.model.n_kv
        try:
            self.model.decode(tokens, position=position)
        except NativeError as error:
            require(error.status == status, f"{error.status.name} instead of {status.name}: {error}")
            require(bool(error.message), "the error has no message")
            require(self.model.n_kv == n_kv, f"the KV cache holds {self.model.n_kv} instead of {n_kv}")
            return error
        raise AssertionError(f"decoded in spite of the fault, expected {status.name}")

    def forget_experts(self) -> None:
        self.model.experts.allocate(self.model.experts.floor_bytes)

    def require_right(self) -> None:
        transcript = transcribe(self.model)
        require(transcript == self.expected, transcript.difference(self.expected))


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


# ── reads that fail ─────────────────────────────────────────────────────────────────────────────


def read_error(scene: Scene) -> None:
    """EIO in the prompt and in the middle of an answer, after any number of good reads."""
    scene.require_right()
    n_errors = 0
    for n_spared in (0, 1, 2, 5, 11):
        scene.forget_experts()
        scene.model.clear()
        scene.fail_reads(n_spared)
        error = scene.refuse(Status.IO, PROMPT, 0)
        require(scene.path.name in error.message, f"the file is not named: {error}")
        scene.refuse(Status.IO, PROMPT, 0)
        scene.heal()
        read_errors = scene.model.experts.stats().read_errors
        require(read_errors > n_errors, "read_errors does not count")
        n_errors = read_errors
        scene.require_right()


def read_error_keeps_the_answer(scene: Scene) -> None:
    """An answer goes on where it was when the drive recovers."""
    scene.model.clear()
    rows = [scene.model.decode(PROMPT, position=0)]
    for i, token in enumerate(scene.expected.tokens):
        if i % 4 == 1:
            scene.forget_experts()
            scene.fail_reads(i % 3)
            scene.refuse(Status.IO, [token], len(PROMPT) + i)
            scene.heal()
        rows.append(scene.model.decode([token], position=len(PROMPT) + i))
    transcript = Transcript(scene.expected.tokens, np.concatenate(rows))
    require(transcript == scene.expected, transcript.difference(scene.expected))


def read_error_in_a_prefetch(scene: Scene) -> None:
    """Nobody asked for it yet: it is dropped, and read again when it is needed."""
    experts = scene.model.experts
    scene.fail_reads()
    experts.prefetch([(layer, expert) for layer in experts.layers for expert in range(4)])
    deadline = time.monotonic() + 20
    while any(Residency.IN_FLIGHT in experts.residency(layer) for layer in experts.layers):
        require(time.monotonic() < deadline, "failed prefetches stay in flight")
        time.sleep(0.001)
    scene.heal()
    require(experts.stats().read_errors > 0, "no read failed")
    for layer in experts.layers:
        require(Residency.RESIDENT not in experts.residency(layer), "a failed read counts as resident")
    scene.require_right()


def short_reads(scene: Scene) -> None:
    """A read that returns less than asked is finished or refused, never taken for whole."""
    for short_bytes in (4096, 8192, 1000, 1):
        scene.forget_experts()
        scene.model.clear()
        scene.faults.short_bytes = short_bytes
        try:
            rows = scene.model.decode(PROMPT, position=0)
        except NativeError as error:
            require(error.status == Status.IO, f"{error.status.name}: {error}")
        else:
            expected = scene.expected.logits[: len(PROMPT)]
            require(rows.tobytes() == expected.tobytes(), "wrong rows after short reads")
        require(scene.faults.n_faulty > 0, "no read came short")
        scene.heal()
        scene.forget_experts()
        scene.require_right()


def slow_reads(scene: Scene) -> None:
    """Prefetches that come too late are counted so, and those whose turn has not come can be cancelled."""
    experts = scene.model.experts
    experts.allocate(Layout.of(scene.path).full_bytes)
    scene.model.library.set_router_recording(scene.model.context, True)
    scene.model.decode([7], position=0)
    used = [
        (layer, int(expert))
        for layer, rows in enumerate(scene.model.router_ids())
        for expert in rows.ravel()
        if expert >= 0
    ]
    experts.allocate(Layout.of(scene.path).full_bytes)
    scene.model.clear()
    before = experts.stats()
    scene.faults.delay_us = 5000
    require(experts.prefetch(used) == len(used), "no slots for prefetches")
    scene.model.decode([7], position=0)
    stats = experts.stats()
    late = stats.prefetches_late - before.prefetches_late
    in_time = stats.prefetches_used - before.prefetches_used
    require(late > 0, "no prefetch was late")
    require(late + in_time == len(used), f"{late} late and {in_time} in time of {len(used)} prefetches")
    require(sum(stats.stall_seconds) > sum(before.stall_seconds), "waiting is not counted as a stall")

    everything = [(layer, expert) for layer in experts.layers for expert in range(experts.n_experts)]
    n_resident = sum(experts.residency(layer).count(Residency.RESIDENT) for layer in experts.layers)
    require(experts.prefetch(everything) == len(everything), "no slots for prefetches")
    require(experts.costs().queued_seconds > 0, "queued reads cost nothing")
    n_cancelled = experts.cancel_prefetches()
    require(0 < n_cancelled <= len(everything) - n_resident, f"{n_cancelled} cancelled")
    while any(Residency.IN_FLIGHT in experts.residency(layer) for layer in experts.layers):
        time.sleep(0.001)
    landed = sum(experts.residency(layer).count(Residency.RESIDENT) for layer in experts.layers)
    require(landed == len(everything) - n_cancelled, "cancelled prefetches were read")
    scene.heal()
    scene.require_right()


# ── files that change ───────────────────────────────────────────────────────────────────────────


def truncated(scene: Scene) -> None:
    """A model file cut while it is served, and put right again."""
    files = [Path(file["path"]) for file in Layout.of(scene.path).document["files"]]
    scene.require_right()
    for file in files:
        content, status = file.read_bytes(), file.stat()
        for length in (len(content) // 2, 0):
            scene.forget_experts()
            scene.model.clear()
            os.truncate(file, length)
            error = scene.refuse(Status.IO, PROMPT, 0)
            require(file.name in error.message, f"{file.name} is not named: {error}")
            scene.refuse(Status.IO, PROMPT, 0)
            with file.open("r+b") as restored:
                restored.write(content)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
            scene.require_right()


def overwritten(scene: Scene) -> None:
    """Other bytes in the same file: its experts are no longer those of the model that is loaded."""
    content = scene.path.read_bytes()
    scene.forget_experts()
    scene.model.clear()
    with scene.path.open("r+b") as file:
        file.seek(len(content) // 4)
        file.write(bytes(len(content) // 2))
    error = scene.refuse(Status.IO, PROMPT, 0)
    require(scene.path.name in error.message, f"the file is not named: {error}")


def replaced(scene: Scene) -> None:
    """Another file under the same name, as a download or an upgrade leaves it, and none at all."""
    files = [Path(file["path"]) for file in Layout.of(scene.path).document["files"]]
    for file in files:
        other = file.with_suffix(".new")
        other.write_bytes(b"GGUF of tomorrow" * 1000)
        other.rename(file)
    scene.forget_experts()
    scene.require_right()
    for file in files:
        file.unlink()
    scene.forget_experts()
    scene.require_right()


# ── memory ──────────────────────────────────────────────────────────────────────────────────────


def no_memory(scene: Scene) -> None:
    """Slots that the system has no memory for are refused; the cache can be given less afterwards."""
    experts = scene.model.experts
    scene.require_right()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    full_bytes = Layout.of(scene.path).full_bytes
    available = experts.floor_bytes + (full_bytes - experts.floor_bytes) // 4
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + available - experts.floor_bytes, hard)
    )
    try:
        experts.allocate(full_bytes)
    except NativeError as error:
        require(error.status == Status.NO_MEMORY, f"{error.status.name}: {error}")
        require(bool(error.message), "the error has no message")
    else:
        raise AssertionError("more slots than memory were allocated")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    experts.allocate(experts.floor_bytes)
    scene.require_right()


_ANY_READER = (
    read_error,
    read_error_keeps_the_answer,
    read_error_in_a_prefetch,
    truncated,
    overwritten,
    replaced,
)
_BY_PREAD = (short_reads, slow_reads, no_memory)
CASES: dict[str, Callable[[Scene], None]] = {case.__name__: case for case in (*_ANY_READER, *_BY_PREAD)}
WAYS: list[tuple[str, Reader, Io]] = [
    *((case.__name__, "threads", "buffered") for case in _ANY_READER + _BY_PREAD),
    *((case.__name__, "threads", "direct") for case in _ANY_READER),
    *((case.__name__, "io_uring", "direct") for case in _ANY_READER),
]
"""(case, reader, io) of every case that can be made to happen."""


def main(case: str, model: str, reader: Reader, io: Io) -> None:
    scene = Scene(Path(model), reader, io)
    CASES[case](scene)
    scene.close()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
