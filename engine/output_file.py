"""Files that a command writes at the end of long work."""

from __future__ import annotations

import os
from pathlib import Path


class OutputFileError(Exception):
    """The file could not be written; the message is one line with the remedy."""


def check_output(path: Path) -> None:
    """Before the work. Raises OutputFileError."""
    if path.is_dir():
        raise OutputFileError(f"{path} is a directory; name a file")
    if not path.parent.is_dir():
        raise OutputFileError(f"{path.parent} is not a directory; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputFileError(f"cannot write {path}; choose another file")
