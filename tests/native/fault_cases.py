"""Faults under a running model, each a function of its own in a process of its own.

    python fault_cases.py CASE MODEL READER IO

MODEL is a copy that the case may damage. The process has fault_shim.c preloaded. It exits 0 when all went as
it should; an exception, or a signal, is what the test reports.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from s2moe.engine.native import NativeError, Status
from s2moe.engine.native_experts import Experts, Io, Priority, Reader, Residency, Trigger

from fault_control import Faults
from stored_model import PROMPT, Layout, StoredModel, Transcript, resident_set, settle, transcribe

N_RACES = 30
"""Prompts beside prefetches."""
N_READS_OF_TWO_LAYERS = 2 * 12 * 3


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

    def require_true_gauges(self) -> None:
        """What is counted as resident is what is resident."""
        settle(self.model.experts)
        counted, resident = self.model.experts.stats().resident_experts, len(resident_set(self.model.experts))
        require(counted == resident, f"{counted} experts are counted, {resident} are resident")


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


def one_read_error(scene: Scene) -> None:
    """A drive that fails once, while other reads of the same experts go on."""
    expected = scene.expected.logits[: len(PROMPT)].tobytes()
    n_refused = 0
    for delay_us in (200, 300, 400):
        for n_spared in (0, 1, 5, 8, 9, 11, 14, 20, 30):
            scene.forget_experts()
            scene.model.clear()
            scene.faults.delay_us = delay_us
            scene.faults.fail_reads(n_spared, n_failing=1)
            try:
                rows = scene.model.decode(PROMPT, position=0)
            except NativeError as error:
                require(error.status == Status.IO, f"{error.status.name}: {error}")
                n_refused += 1
            else:  # nobody was waiting for the read yet
                require(rows.tobytes() == expected, "wrong rows with a read error")
                scene.model.clear()
            scene.require_true_gauges()
            require(scene.faults.n_faulty == 1, f"{scene.faults.n_faulty} reads failed")
            scene.heal()
            scene.faults.n_faulty = 0
            rows = scene.model.decode(PROMPT, position=0)
            require(rows.tobytes() == expected, "wrong rows after a read error")
            scene.require_true_gauges()
    require(n_refused > 10, f"only {n_refused} prompts failed")
    scene.require_right()


def prefetches_beside_prompts(scene: Scene) -> None:
    """Other threads prefetch what a prompt is about to ask for, while its slots are being read into.

    A prompt that failed in its third layer leaves reads of that layer on their way. The next one needs all
    slots of the class for its first layer: it waits for them one by one, and prefetches get in between.
    """
    experts = scene.model.experts
    prompt = [30 + i for i in range(100)]
    expected = scene.model.decode(prompt, position=0).tobytes()
    n_refused = 0
    for i in range(N_RACES):
        with asking_for_the_first_layer(experts):
            scene.model.clear()
            scene.faults.delay_us = 2000
            scene.faults.fail_reads(N_READS_OF_TWO_LAYERS, n_failing=1)
            try:
                scene.model.decode(prompt, position=0)
            except NativeError:
                n_refused += 1
            scene.model.clear()
            rows = scene.model.decode(prompt, position=0)
        require(rows.tobytes() == expected, f"wrong rows beside prefetches, round {i}")
        scene.heal()
        scene.require_true_gauges()
    require(n_refused > 0, "no prompt failed")
    scene.require_right()


@contextmanager
def asking_for_the_first_layer(experts: Experts) -> Iterator[None]:
    """Meanwhile two threads prefetch its experts at random, one by one."""
    done = threading.Event()

    def ask(seed: int) -> None:
        order = random.Random(seed)
        while not done.is_set():
            experts.prefetch([(0, order.randrange(experts.n_experts))])

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


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


def prefetch_before_warm_ups(scene: Scene) -> None:
    """A prefetch does not wait for warm-ups that have not begun, be it queued as one of them itself."""
    experts = scene.model.experts
    experts.allocate(Layout.of(scene.path).full_bytes)
    n_all = len(experts.layers) * experts.n_experts
    last = (experts.layers[-1], experts.n_experts - 1)
    scene.faults.delay_us = 5000
    experts.warm([list(range(200 + experts.n_experts, 200, -1))] * len(experts.layers))
    require(experts.prefetch([last]) == 1, "a queued warm-up has no slot")
    deadline = time.monotonic() + 20
    while last not in (resident := resident_set(experts)):
        require(time.monotonic() < deadline, "the prefetch does not land")
        time.sleep(0.001)
    require(len(resident) < n_all // 4, f"{len(resident) - 1} of {n_all} warm-ups came first")
    require(experts.prefetch([(0, 0)], Priority.WARMUP) == 1, "a warm-up has no slot")
    settle(experts)
    stats = experts.stats()
    require(len(resident_set(experts)) == n_all, "warm-ups were lost")
    require(stats.loads[Trigger.WARMUP] + stats.loads[Trigger.PREFETCH] == n_all, "an expert was read twice")
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
_BY_PREAD = (
    one_read_error,
    prefetches_beside_prompts,
    short_reads,
    slow_reads,
    prefetch_before_warm_ups,
    no_memory,
)
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
