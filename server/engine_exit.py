"""How an engine process ended, in words for the operator and as a reason for the metrics."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

_OUT_OF_MEMORY = re.compile(r"out of memory|\bENOMEM\b|cannot allocate memory|MemoryError", re.IGNORECASE)
_MAX_TAIL_LINES = 8
_MAX_TAIL_CHARS = 1500


@dataclass(frozen=True)
class Condemnation:
    """Why the supervisor itself ended a process."""

    reason: str
    """`hang` or `crash`."""
    message: str


@dataclass(frozen=True)
class EngineExit:
    returncode: int | None
    """As subprocess gives it, negative for a signal; None when the process could not even be started."""
    condemnation: Condemnation | None = None
    oom_killed: bool = False
    """The kernel's count of OOM kills rose shortly before."""
    fatal_message: str | None = None
    """What the engine itself said in Fatal."""
    stderr_tail: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """`hang`, `oom` or `crash`, as EngineObserver.on_restart wants it."""
        if self.condemnation is not None and self.condemnation.reason == "hang":
            return "hang"
        if self.returncode == -signal.SIGKILL and self.oom_killed and self.condemnation is None:
            return "oom"
        said = "\n".join((*self.stderr_tail, self.fatal_message or ""))
        return "oom" if _OUT_OF_MEMORY.search(said) else "crash"

    @property
    def summary(self) -> str:
        """One sentence without the stderr."""
        if self.fatal_message is not None:
            return f"engine could not start: {self.fatal_message}"
        if self.condemnation is not None:
            return self.condemnation.message
        if self.returncode is None:
            return "engine could not be started"
        if self.returncode < 0:
            number = -self.returncode
            hint = " because the machine ran out of memory" if self.reason == "oom" else ""
            return f"engine killed by signal {number} ({_signal_name(number)}){hint}"
        if self.returncode == 0:
            return "engine exited with code 0 although nobody asked it to"
        hint = " (out of memory)" if self.reason == "oom" else ""
        return f"engine exited with code {self.returncode}{hint}"

    @property
    def report(self) -> str:
        """One line: the summary and the end of the engine's stderr."""
        lines = [line.strip() for line in self.stderr_tail if line.strip()][-_MAX_TAIL_LINES:]
        if not lines:
            return self.summary
        return f"{self.summary}; its last words: {' | '.join(lines)[-_MAX_TAIL_CHARS:]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


class OomKillCounter:
    """The kernel's count of OOM-killed processes: of our cgroup (v2), else of the whole machine.

    A rise around the death of the engine is a hint, not a proof, where only the machine's count is known.
    Reads 0 forever where the kernel exports neither.
    """

    def __init__(self, candidates: tuple[Path, ...] | None = None) -> None:
        paths = (_cgroup_events(), Path("/proc/vmstat")) if candidates is None else candidates
        self._path = next((path for path in paths if path is not None and path.is_file()), None)

    def read(self) -> int:
        if self._path is None:
            return 0
        try:
            text = self._path.read_text()
        except OSError:  # the cgroup was moved away under us; the hint is then not available
            return 0
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0


def _cgroup_events() -> Path | None:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::"):
            return Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "memory.events"
    return None
