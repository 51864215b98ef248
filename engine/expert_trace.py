"""The trace of `--expert-trace FILE`: what each decode asked of the expert cache, one JSON object per line.

    {"begin_ns": …, "end_ns": …, "n_tokens": …, "layers": [[…], …]}

begin_ns and end_ns (CLOCK_MONOTONIC) enclose the native call; n_tokens went through it. Each entry of
`layers` is one layer of one micro-batch, in the order of evaluation; its values are those of LAYER_FIELDS.
Written for bench/offload.py, which computes from it how fast the run could have been.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Final

from s2moe.engine.errors import EngineStartError
from s2moe.engine.native_experts import Experts
from s2moe.engine.regular_file import check_regular

logger = logging.getLogger(__name__)

LAYER_FIELDS: Final = (
    "layer",
    "begin_ns",
    "n_hits",
    "n_misses",
    "missed_bytes",
    "stall_seconds",
    "compute_seconds",
)
"""Order of the values of a layer; their meaning is that of struct s2moe_expert_trace."""

KEPT_RECORDS: Final = 1 << 16
"""A prompt may be cut into many micro-batches, each with a record per layer."""


class ExpertTraceFile:
    """Writes the trace of one store. Used by the thread that decodes."""

    def __init__(self, path: Path, experts: Experts) -> None:
        """Begins a new file. Raises EngineStartError when it cannot be written."""
        try:
            if path.exists():
                check_regular(path)
            # Unbuffered: the engine may end without closing anything, and nobody else can flush for it.
            self._file = path.open("wb", buffering=0)
            self._check_space()
        except OSError as error:
            raise EngineStartError(
                "trace_unwritable",
                f"--expert-trace: cannot write {path}: {error.strerror}; choose another file",
            ) from error
        self._path = path
        self._n_bytes = 0
        self._stopped = False
        self._experts = experts
        self._n_at_once = 2 * len(experts.layers)
        experts.set_trace(KEPT_RECORDS)

    def discard(self) -> None:
        """Forgets what a decode that failed left in the store."""
        while len(self._experts.take_trace(self._n_at_once)) == self._n_at_once:
            pass

    def add(self, begin_ns: int, n_tokens: int) -> None:
        """Writes what the decode that has just returned left in the store; it began at begin_ns."""
        if self._stopped:
            return
        end_ns = time.monotonic_ns()
        layers = []
        while True:
            records = self._experts.take_trace(self._n_at_once)
            layers += [[getattr(record, name) for name in LAYER_FIELDS] for record in records]
            if len(records) < self._n_at_once:
                break
        line = {"begin_ns": begin_ns, "end_ns": end_ns, "n_tokens": n_tokens, "layers": layers}
        try:
            self._write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            self._stop(error)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file.fileno(), rest) :]
        self._n_bytes += len(data)

    def _check_space(self) -> None:
        """A drive that is full already says so at the first byte only."""
        os.write(self._file.fileno(), b"\n")
        os.ftruncate(self._file.fileno(), 0)
        os.lseek(self._file.fileno(), 0, os.SEEK_SET)

    def _stop(self, error: OSError) -> None:
        """A trace is no reason to answer nobody: it ends here, with its last whole line."""
        self._stopped = True
        self._experts.set_trace(0)
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fileno(), self._n_bytes)
        logger.error(
            "--expert-trace: cannot write %s: %s; nothing more is traced", self._path, error.strerror or error
        )

    def close(self) -> None:
        """Before the store is closed."""
        self._experts.set_trace(0)
        self._file.close()
