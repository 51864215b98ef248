"""How fast this machine reads memory, measured in a fraction of a second."""

from __future__ import annotations

import ctypes
import threading
import time

_libc = ctypes.CDLL(None)
_libc.memchr.restype = ctypes.c_void_p
_libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

BLOCK_BYTES = 96 << 20
"""Read by each thread again and again: more than the caches hold."""


def measure_memory_speed(n_threads: int, seconds: float = 0.3) -> float:
    """Bytes per second that n_threads read together, one after the other, as weights are read.

    The C library's search for a byte that is not there, which runs outside of the interpreter's lock.
    """
    blocks = [(ctypes.c_char * BLOCK_BYTES)() for _ in range(n_threads)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    totals = [0] * n_threads
    stop = threading.Event()

    def read(index: int) -> None:
        while not stop.is_set():
            _libc.memchr(blocks[index], 0, BLOCK_BYTES)
            totals[index] += BLOCK_BYTES

    threads = [threading.Thread(target=read, args=(index,)) for index in range(n_threads)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return sum(totals) / (time.monotonic() - started)
