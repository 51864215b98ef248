"""The test's side of fault_shim.c: faults of reads, switched while the process under test runs."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fault_shim.c")
VARIABLE = "S2MOE_FAULTS"


class Faults(ctypes.Structure):
    """struct faults of fault_shim.c, in a file that both sides map."""

    _fields_ = (
        ("read_errno", ctypes.c_int32),
        ("n_spared", ctypes.c_int32),
        ("n_failing", ctypes.c_int32),
        ("short_bytes", ctypes.c_int32),
        ("delay_us", ctypes.c_int32),
        ("refuse_direct", ctypes.c_int32),
        ("n_reads", ctypes.c_int32),
        ("n_faulty", ctypes.c_int32),
    )
    read_errno: int
    n_spared: int
    n_failing: int
    short_bytes: int
    delay_us: int
    refuse_direct: int
    n_reads: int
    n_faulty: int

    @classmethod
    def shared(cls) -> Faults:
        """Those of this process, which was started with `preload_environment`."""
        with Path(os.environ[VARIABLE]).open("r+b") as file:
            return cls.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(cls)))

    def fail_reads(self, n_spared: int = 0, n_failing: int = 0) -> None:
        """Of the reads after the next `n_spared`, the first `n_failing` (0: all) fail with EIO."""
        self.n_spared = n_spared
        self.n_failing = n_failing
        self.read_errno = errno.EIO

    def clear(self) -> None:
        self.read_errno = self.n_spared = self.n_failing = 0
        self.short_bytes = self.delay_us = 0


def build_shim(folder: Path) -> Path:
    """Compiles the shim into `folder`. Raises CalledProcessError with the compiler's words."""
    library = folder / "libfaults.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def preload_environment(library: Path, control: Path, faults: Faults | None = None) -> dict[str, str]:
    """What a process under test needs in its environment. `control` is written; it starts with `faults`."""
    control.write_bytes(bytes(faults or Faults()))
    return {"LD_PRELOAD": str(library), VARIABLE: str(control)}
