"""How far a download is: a bar on a terminal, lines elsewhere, such as in the log of a container."""

from __future__ import annotations

import sys
import time
from typing import Any, Final, Protocol, TextIO

LINE_EVERY_SECONDS: Final = 5.0


class Progress(Protocol):
    """Told about one file after the other: start(), at() any number of times, stop()."""

    def say(self, line: str) -> None: ...

    def start(self, name: str, size_bytes: int, done_bytes: int) -> None: ...

    def at(self, done_bytes: int) -> None: ...

    def stop(self) -> None: ...


class LineProgress:
    """A line every few seconds."""

    def __init__(self, out: TextIO, every_seconds: float = LINE_EVERY_SECONDS) -> None:
        self._out = out
        self._every_seconds = every_seconds
        self._name = ""
        self._size_bytes = 0
        self._first_bytes = 0
        self._done_bytes = 0
        self._started = self._told = 0.0

    def say(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def start(self, name: str, size_bytes: int, done_bytes: int) -> None:
        self._name, self._size_bytes = name, size_bytes
        self._first_bytes = self._done_bytes = done_bytes
        self._started = self._told = time.monotonic()

    def at(self, done_bytes: int) -> None:
        self._done_bytes = done_bytes
        if time.monotonic() - self._told >= self._every_seconds:
            self._tell()

    def stop(self) -> None:
        if self._done_bytes > self._first_bytes or self._done_bytes == self._size_bytes:
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        rate = (self._done_bytes - self._first_bytes) / max(self._told - self._started, 1e-3)
        self.say(
            f"{self._name}: {percent_text(self._done_bytes, self._size_bytes)}, "
            f"{size_text(self._done_bytes)} of {size_text(self._size_bytes)}, {size_text(rate)}/s"
        )


class BarProgress:
    """A bar that is redrawn in place, by tqdm, which comes with huggingface_hub."""

    def __init__(self, out: TextIO) -> None:
        from tqdm import tqdm

        self._new_bar = tqdm
        self._out = out
        self._bar: Any = None

    def say(self, line: str) -> None:
        if self._bar is None:
            print(line, file=self._out, flush=True)
        else:
            self._bar.write(line, file=self._out)  # above the bar

    def start(self, name: str, size_bytes: int, done_bytes: int) -> None:
        self._bar = self._new_bar(
            desc=name, total=size_bytes, initial=done_bytes, unit="B", unit_scale=True, file=self._out
        )

    def at(self, done_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(done_bytes - self._bar.n)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def progress_on(out: TextIO | None = None) -> Progress:
    """The kind that suits `out`, stderr unless given."""
    out = sys.stderr if out is None else out
    return BarProgress(out) if out.isatty() else LineProgress(out)


def size_text(n_bytes: float) -> str:
    """`4.21 GB`, `98.5 MB`: decimal, as hubs and drives count."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.2f} GB" if n_bytes < 1e11 else f"{n_bytes / 1e9:.0f} GB"
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.1f} kB"


def percent_text(done_bytes: int, size_bytes: int) -> str:
    return f"{100 * done_bytes // max(size_bytes, 1)} %"
