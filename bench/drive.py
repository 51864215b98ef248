"""How fast the drive gives experts at random places of the model file."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE
N_THREADS = 4
N_BYTES = 512 << 20


@dataclass(frozen=True)
class DriveSpeed:
    """One measurement."""

    bytes_per_second: float
    block_bytes: int
    n_threads: int
    n_bytes: int


class Drive:
    """The drive under one file, read with O_DIRECT so that no cache helps."""

    def __init__(self, path: Path, block_bytes: int, n_threads: int = N_THREADS) -> None:
        """`block_bytes`: size of one read, rounded up to whole pages; n_threads of them are in flight."""
        self._path = path
        self._block_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        self._n_threads = n_threads
        self._random = random.Random(0)  # noqa: S311 - places to read, no secrets

    def measure(self, n_bytes: int = N_BYTES) -> DriveSpeed:
        """Reads n_bytes. Raises OSError where the file system refuses O_DIRECT."""
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
