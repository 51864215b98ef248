"""KV rows of conversations other than the running one, in host memory: who comes back goes on where he was.

docs/prompt-cache.md describes it to users.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from s2moe.engine.evaluated_tokens import EvaluatedTokens, token_array
from s2moe.engine.plan import show
from s2moe.engine.sequence_state import HostBuffer, page_bytes
from s2moe.engine.snapshot_files import SnapshotFile, SnapshotFiles

logger = logging.getLogger(__name__)

MIN_DROPPED_TOKENS: Final = 32
"""Fewer tokens of the KV cache are faster evaluated again than copied."""
MIN_GAINED_TOKENS: Final = 16
"""By so many a snapshot must share more with a prompt than the KV cache does: many of them begin alike."""
CLOSE_SECONDS: Final = 8.0
"""After so long no further file is begun when the engine ends."""

SAVED: Final = "saved"
RESTORED: Final = "restored"
EVICTED: Final = "evicted"
LOADED: Final = "loaded"
"""Events, as EngineStats names them; snapshot_files has one more."""
PREFIX_CHANGED: Final = "prefix_changed"
"""A prompt departed from what the KV cache held, and the rest of that was dropped."""
NOT_CUTTABLE: Final = "not_cuttable"
"""The same, but all of it had to be dropped: a recurrent state, or a window that had moved on."""


class RunningSequence(Protocol):
    """What the cache does to the running sequence; `sequence_state.SequenceState` is one."""

    n_ctx: int

    @property
    def has_window(self) -> bool: ...

    @property
    def copies_can_be_cut(self) -> bool: ...

    def can_be_cut(self, n_tokens: int) -> bool: ...

    def cut(self, n_tokens: int) -> bool: ...

    def n_bytes(self) -> int: ...

    def copy_to(self, buffer: HostBuffer) -> bool: ...

    def restore(self, buffer: HostBuffer, n_tokens: int) -> bool: ...


@dataclass
class Snapshot:
    """One conversation."""

    evaluated: EvaluatedTokens
    buffer: HostBuffer
    """The KV rows."""
    used_ns: int
    """When last used, Unix time; no two are alike."""

    @property
    def n_bytes(self) -> int:
        return snapshot_bytes(self.evaluated, self.buffer.n_data_bytes)


def snapshot_bytes(evaluated: EvaluatedTokens, n_state_bytes: int) -> int:
    return page_bytes(n_state_bytes) + evaluated.n_bytes


class PromptCache:
    """Snapshots within a budget of bytes, to which the index of the files counts. Used by one thread, and not
    during a decode.

    Nothing here fails: what cannot be kept is evaluated again.
    """

    def __init__(
        self,
        sequence: RunningSequence,
        budget_bytes: int,
        files: SnapshotFiles | None = None,
        *,
        events: Counter[str] | None = None,
    ) -> None:
        """`budget_bytes`: 0 = keep nothing. `events`: to count in, as the `files` do."""
        self._sequence = sequence
        self.budget_bytes = budget_bytes
        self._files = files if budget_bytes else None
        self._events = Counter[str]() if events is None else events
        self._snapshots: list[Snapshot] = []
        self._n_prompt = 0
        """Tokens of the last prompt."""
        self._last_ns = 0

    @property
    def n_entries(self) -> int:
        return len(self._snapshots)

    @property
    def n_bytes(self) -> int:
        """Never above the budget."""
        index_bytes = 0 if self._files is None else self._files.index_bytes
        return index_bytes + sum(snapshot.n_bytes for snapshot in self._snapshots)

    def take_events(self) -> dict[str, int]:
        """Since the last call."""
        events = dict(self._events)
        self._events.clear()
        return events

    def count_lost(self, reason: str) -> None:
        """PREFIX_CHANGED or NOT_CUTTABLE."""
        self._events[reason] += 1

    def exchange(
        self, live: EvaluatedTokens, prompt: Sequence[int], *, exact: bool
    ) -> EvaluatedTokens | None:
        """Makes the KV cache, which holds `live`, the best start for a prompt whose last token is to be
        evaluated in any case. `exact`: what gating had a part in is of no use.

        Returns what the KV cache holds now; None = still the same.
        """
        if not self.budget_bytes:
            return None
        wanted = token_array(prompt[:-1])
        n_live = live.usable(wanted, exact=exact, can_be_cut=True)
        if n_live < len(live) and not self._sequence.can_be_cut(n_live):
            n_live = 0
        found = self._find(wanted, n_live + MIN_GAINED_TOKENS, exact=exact)
        n_kept = n_live if found is None else 0
        held = live
        if len(live) - n_kept > MIN_DROPPED_TOKENS:
            held = self._save(live, n_kept, spared=found)
        self._n_prompt = len(prompt)
        if found is not None:
            return self._restore(found)
        return None if held is live else held

    def drop(self, n_bytes: int) -> int:
        """Evicts snapshots until n_bytes are free, or all. Returns the bytes that became free."""
        before = self.n_bytes
        while self._snapshots and before - self.n_bytes < n_bytes:
            self._evict(self._least_useful(self._snapshots))
        return before - self.n_bytes

    def close(self, live: EvaluatedTokens) -> None:
        """Writes what the next run can use, the last used first, and frees everything."""
        if self._files is not None:
            deadline = time.monotonic() + CLOSE_SECONDS
            if len(live) > MIN_DROPPED_TOKENS:
                self._save(live, 0)
            for snapshot in sorted(self._snapshots, key=lambda each: -each.used_ns):
                if time.monotonic() > deadline:
                    logger.warning("not all conversations of the prompt cache were kept: the time is up")
                    break
                if not self._is_covered(snapshot.evaluated, snapshot):
                    self._write(snapshot)
        for snapshot in self._snapshots:
            snapshot.buffer.close()
        self._snapshots.clear()

    # finding

    def _find(self, wanted: array[int], n_least: int, *, exact: bool) -> Snapshot | None:
        """The snapshot that a prompt shares most with, if n_least tokens or more; loaded if it was a file."""
        while True:
            best: Snapshot | SnapshotFile | None = None
            n_best = n_least - 1
            candidates: list[Snapshot | SnapshotFile] = [*self._snapshots, *self._loadable()]
            for each in candidates:
                n = each.evaluated.usable(wanted, exact=exact, can_be_cut=self._sequence.copies_can_be_cut)
                if n > n_best:
                    best, n_best = each, n
            if not isinstance(best, SnapshotFile):
                return best
            loaded = self._load(best)
            if loaded is not None:
                return loaded

    def _loadable(self) -> list[SnapshotFile]:
        if self._files is None:
            return []
        return [each for each in self._files.entries if self._can_load(each)]

    def _can_load(self, file: SnapshotFile) -> bool:
        n_bytes = snapshot_bytes(file.evaluated, file.n_state_bytes)
        fits = self._files is not None and n_bytes + self._files.index_bytes <= self.budget_bytes
        return fits and len(file.evaluated) < self._sequence.n_ctx

    def _load(self, file: SnapshotFile) -> Snapshot | None:
        """None: it could not be loaded, and is no longer among the files that can."""
        assert self._files is not None
        used_ns = self._now_ns()
        self._files.touch(file, used_ns)  # what is evicted for it must not replace it
        buffer = None
        if self._make_room(snapshot_bytes(file.evaluated, file.n_state_bytes)):
            buffer = _allocate(file.n_state_bytes)
        if buffer is None:
            self._files.entries.remove(file)
            return None
        with buffer.view() as rows:
            is_intact = self._files.read(file, rows)
        if not is_intact:
            buffer.close()
            return None
        snapshot = Snapshot(file.evaluated, buffer, used_ns)
        self._snapshots.append(snapshot)
        self._events[LOADED] += 1
        return snapshot

    def _restore(self, snapshot: Snapshot) -> EvaluatedTokens:
        """Returns what the KV cache holds then."""
        snapshot.used_ns = self._now_ns()
        if self._sequence.restore(snapshot.buffer, len(snapshot.evaluated)):
            self._events[RESTORED] += 1
            logger.debug("%d tokens restored from the prompt cache", len(snapshot.evaluated))
            return snapshot.evaluated
        logger.warning("a conversation of the prompt cache does not fit the KV cache and is dropped")
        self._remove(snapshot)
        return EvaluatedTokens(token_array([]), 0)

    # keeping

    def _save(self, live: EvaluatedTokens, n_kept: int, spared: Snapshot | None = None) -> EvaluatedTokens:
        """Keeps the running sequence, of which the next prompt keeps n_kept tokens. `spared` is not evicted
        for it. Returns what the KV cache holds then."""
        live = self._cut_to_prompt(live, n_kept)
        if self._holds_most_of(live):
            return live
        n_state_bytes = self._sequence.n_bytes()
        if n_state_bytes == 0 or not self._make_room(snapshot_bytes(live, n_state_bytes), live, spared):
            return live
        buffer = _allocate(n_state_bytes)
        if buffer is None:
            return live
        if not self._sequence.copy_to(buffer):
            buffer.close()
            return live
        self._snapshots.append(Snapshot(live, buffer, self._now_ns()))
        self._events[SAVED] += 1
        logger.debug("%d tokens kept in the prompt cache, %s", len(live), show(buffer.n_bytes))
        return live

    def _holds_most_of(self, live: EvaluatedTokens) -> bool:
        """Whether a snapshot, which then counts as used, lacks a few tokens of it at most."""
        for snapshot in self._snapshots:
            evaluated = snapshot.evaluated
            n_shared = evaluated.usable(live.tokens, exact=False, can_be_cut=self._sequence.copies_can_be_cut)
            if min(n_shared - len(live), evaluated.n_exact - live.n_exact) >= -MIN_DROPPED_TOKENS:
                snapshot.used_ns = self._now_ns()
                return True
        return False

    def _cut_to_prompt(self, live: EvaluatedTokens, n_kept: int) -> EvaluatedTokens:
        """Where layers look back only so far, a copy is of use as a whole or not at all. The next turn begins
        with this one's prompt, but hardly with its answer, reasoning included: off with it."""
        n_tokens = max(self._n_prompt - 1, n_kept)
        if not self._sequence.has_window or not 0 < n_tokens < len(live):
            return live
        return live.first(n_tokens) if self._sequence.cut(n_tokens) else live

    def _make_room(
        self, n_bytes: int, newest: EvaluatedTokens | None = None, spared: Snapshot | None = None
    ) -> bool:
        """Evicts others until n_bytes fit. Returns whether they do; nothing is evicted when they cannot."""
        spared_bytes = 0 if spared is None else spared.n_bytes
        if n_bytes + spared_bytes > self.budget_bytes:
            return False
        while self.n_bytes + n_bytes > self.budget_bytes:
            victims = [snapshot for snapshot in self._snapshots if snapshot is not spared]
            if not victims:
                return False
            self._evict(self._least_useful(victims, newest), newest)
        return True

    def _least_useful(self, victims: list[Snapshot], newest: EvaluatedTokens | None = None) -> Snapshot:
        """What another one covers, else the one not used for longest."""
        return min(
            victims,
            key=lambda each: (not self._is_covered(each.evaluated, each, newest), each.used_ns),
        )

    def _is_covered(
        self, evaluated: EvaluatedTokens, itself: Snapshot, newest: EvaluatedTokens | None = None
    ) -> bool:
        others = [each.evaluated for each in self._snapshots if each is not itself]
        if newest is not None:
            others.append(newest)
        can_be_cut = self._sequence.copies_can_be_cut
        return any(other.covers(evaluated, can_be_cut=can_be_cut) for other in others)

    def _evict(self, snapshot: Snapshot, newest: EvaluatedTokens | None = None) -> None:
        if not self._is_covered(snapshot.evaluated, snapshot, newest):
            self._write(snapshot)
        self._remove(snapshot)
        self._events[EVICTED] += 1

    def _remove(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        snapshot.buffer.close()

    def _write(self, snapshot: Snapshot) -> None:
        if self._files is None:
            return
        with snapshot.buffer.view() as rows:
            written = self._files.write(snapshot.evaluated, rows, snapshot.used_ns)
        if written is None:
            return
        can_be_cut = self._sequence.copies_can_be_cut
        for other in list(self._files.entries):
            if other is not written and written.evaluated.covers(other.evaluated, can_be_cut=can_be_cut):
                self._files.remove(other)

    def _now_ns(self) -> int:
        """Unix time, but always later than before."""
        self._last_ns = max(self._last_ns + 1, time.time_ns())
        return self._last_ns


def _allocate(n_bytes: int) -> HostBuffer | None:
    try:
        return HostBuffer(n_bytes)
    except MemoryError as error:
        logger.warning("the prompt cache does without: %s", error)
        return None
