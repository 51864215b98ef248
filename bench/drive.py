"""How fast the drive gives experts at random places of the model file, as it is or under a read limit.

As a command, which is how a read limit is put on it: one measurement of the rate that lasts, printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from s2moe.bench.process import ReadLimit, limited

PAGE_BYTES = mmap.PAGESIZE
N_THREADS = 4
N_BYTES = 512 << 20
CHILD_MEMORY_BYTES = 1 << 30
"""Far more than a measurement takes; bench/memlimit wants a memory limit."""


class DriveError(Exception):
    """A measurement under a read limit failed; the message ends with what its process said."""


@dataclass(frozen=True)
class DriveSpeed:
    """One measurement."""

    bytes_per_second: float
    block_bytes: int
    n_threads: int
    n_bytes: int
    read_limit_bytes_per_second: int | None = None


class Drive:
    """The drive under one file, read with O_DIRECT so that no cache helps."""

    def __init__(
        self,
        path: Path,
        block_bytes: int,
        n_threads: int = N_THREADS,
        *,
        read_limit: ReadLimit | None = None,
        seed: int = 0,
    ) -> None:
        """`block_bytes`: size of one read, rounded up to whole pages; n_threads of them are in flight. No two
        measurements read the same places. `read_limit`: measured under it, in a process of its own."""
        self.read_limit = read_limit
        self._path = path
        self._block_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        self._n_threads = n_threads
        self._random = random.Random(seed)  # noqa: S311 - places to read, no secrets

    def measure(self, n_bytes: int = N_BYTES) -> DriveSpeed:
        """Reads n_bytes. Raises OSError where the file system refuses O_DIRECT, or, under a read limit,
        DriveError."""
        if self.read_limit is not None:
            return self._measure_limited(self.read_limit, n_bytes)
        n_blocks = max(self._n_threads, n_bytes // self._block_bytes)
        n_places = (self._path.stat().st_size - self._block_bytes) // PAGE_BYTES
        places = [self._random.randrange(n_places) * PAGE_BYTES for _ in range(n_blocks)]
        file = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        try:
            seconds = self._read_all(file, places)
        finally:
            os.close(file)
        n_read = n_blocks * self._block_bytes
        return DriveSpeed(n_read / seconds, self._block_bytes, self._n_threads, n_read)

    def _measure_limited(self, read_limit: ReadLimit, n_bytes: int) -> DriveSpeed:
        command = [sys.executable, "-m", "s2moe.bench.drive", str(self._path)]
        command += [str(self._block_bytes), str(self._n_threads), str(n_bytes)]
        command += [str(self._random.getrandbits(32))]
        child = subprocess.run(
            limited(command, CHILD_MEMORY_BYTES, None, keep_caches=True, read_limit=read_limit),
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode != 0:
            said = child.stderr.strip().splitlines()[-3:]
            raise DriveError("\n  ".join([f"measuring the drive ended with {child.returncode}", *said]))
        return replace(
            DriveSpeed(**json.loads(child.stdout)), read_limit_bytes_per_second=read_limit.bytes_per_second
        )

    def _read_all(self, file: int, places: list[int]) -> float:
        failures: list[OSError] = []

        def read(own: list[int]) -> None:
            with mmap.mmap(-1, self._block_bytes) as buffer:  # aligned to a page
                for place in own:
                    try:
                        if os.preadv(file, [buffer], place) != self._block_bytes:
                            raise OSError(f"short read of {self._path} at {place}")
                    except OSError as error:
                        failures.append(error)
                        return

        threads = [
            threading.Thread(target=read, args=(places[n :: self._n_threads],))
            for n in range(self._n_threads)
        ]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - started
        if failures:
            raise failures[0]
        return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    for name in ("block_bytes", "n_threads", "n_bytes", "seed"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args()
    drive = Drive(arguments.path, arguments.block_bytes, arguments.n_threads, seed=arguments.seed)
    drive.measure(arguments.n_bytes // 2)  # what a throttle lets through at once must not count
    print(json.dumps(asdict(drive.measure(arguments.n_bytes))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
