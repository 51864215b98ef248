"""A file in the cache directory that later runs of the server read again."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Final

from s2moe.engine.hot_experts import write_atomically
from s2moe.engine.regular_file import check_regular

logger = logging.getLogger(__name__)

MAX_FILES: Final = 64
"""Files of a directory; those not written for longest go first."""


class KeptFile:
    """Writes one file whole. Problems are logged once and never raised: what is kept only helps."""

    def __init__(self, path: Path, what: str) -> None:
        """`what` it holds, in the plural, for the log."""
        self.path = path
        self._what = what
        self._failed = False

    def write(self, data: bytes) -> bool:
        """Returns whether the file now holds `data`."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                check_regular(self.path)
            write_atomically(self.path, data)
            self._drop_old_files()
        except OSError as error:
            if not self._failed:
                logger.warning("%s cannot be kept: %s: %s", self._what, self.path, error.strerror or error)
            self._failed = True
        else:
            self._failed = False
        return not self._failed

    def _drop_old_files(self) -> None:
        files = list(self.path.parent.glob("*.json"))
        if len(files) <= MAX_FILES:
            return
        files.sort(key=lambda file: file.stat().st_mtime)
        for file in files[: len(files) - MAX_FILES]:
            with contextlib.suppress(OSError):
                file.unlink()
