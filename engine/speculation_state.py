"""What speculation learnt about costs and confidences in earlier runs, kept in the cache directory."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from s2moe.engine.hot_experts import ModelIdentity
from s2moe.engine.kept_file import KeptFile
from s2moe.engine.regular_file import check_regular

logger = logging.getLogger(__name__)

FORMAT: Final = "s2moe-speculation-state"
VERSION: Final = 1
MAX_FILE_BYTES: Final = 2**20
"""Many times what is learnt; more is something else."""
SAVE_INTERVAL_SECONDS: Final = 300.0
BUDGET_STEPS: Final = 16
"""Budgets are told apart by the share of experts that fit, in so many steps: what the machine has left varies
from start to start, and costs hardly follow it."""


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What times depend on. States of other circumstances are not used."""

    model: ModelIdentity
    hardware: str
    """Processor, threads and how experts are read."""
    budget_step: int
    """0 … BUDGET_STEPS: the share of experts that fit into memory."""

    @classmethod
    def of(cls, model: ModelIdentity, hardware: str, resident_share: float) -> Circumstances:
        """`resident_share`: 0 … 1."""
        return cls(model=model, hardware=hardware, budget_step=int(resident_share * BUDGET_STEPS))

    @property
    def file_name(self) -> str:
        key = msgspec.json.encode([self.model.fingerprint, self.hardware, self.budget_step])
        return f"{hashlib.sha256(key).hexdigest()[:32]}.json"


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the file."""

    format: str = FORMAT
    version: int = VERSION
    circumstances: Circumstances
    state: msgspec.Raw
    """JSON of s2moe_speculator_state(), which checks its own version."""


_decoder = msgspec.json.Decoder(_File)


class SpeculationState:
    """The state of one model on one machine over all runs. Problems with the file are logged and never
    raised."""

    def __init__(self, circumstances: Circumstances, directory: Path) -> None:
        self._circumstances = circumstances
        self.path = directory / "speculation" / circumstances.file_name
        self._file = KeptFile(self.path, "what speculation learnt")
        self._loaded: bytes | None = None
        self._saved = b""
        self._save_at: float | None = None

    def load(self) -> bytes | None:
        """What an earlier run saved; None when there is nothing of use."""
        try:
            self._loaded = self._read()
            return self._loaded
        except FileNotFoundError:
            return None
        except OSError as error:
            why = error.strerror or str(error)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            why = str(error)
        logger.warning("what speculation learnt in earlier runs is ignored: %s: %s", self.path, why)
        return None

    def _read(self) -> bytes:
        """Raises OSError, ValueError and what msgspec raises."""
        check_regular(self.path)
        with self.path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it is longer than {MAX_FILE_BYTES >> 20} MiB")
        found = _decoder.decode(data)
        if (found.format, found.version) != (FORMAT, VERSION):
            raise ValueError(f"it has format {found.format!r:.40} version {found.version}")
        if found.circumstances != self._circumstances:
            raise ValueError("it is about another model or machine")
        return bytes(found.state)

    def begin(self, restored: bytes, state: bytes) -> None:
        """`restored`: what a speculator that was given load() says at once. Where it is not what was loaded,
        the speculator could not use all of that. `state`: what it says before its first request; it need not
        be saved."""
        self._saved = state
        if self._loaded is not None and msgspec.json.decode(self._loaded) != msgspec.json.decode(restored):
            logger.warning(
                "what speculation learnt in earlier runs is ignored in part and learnt again: %s holds "
                "values of another version or is damaged",
                self.path,
            )

    def save_if_due(self, now: float, read: Callable[[], bytes]) -> None:
        """Saves every SAVE_INTERVAL_SECONDS what `read` returns; `now` is on any steady clock."""
        if self._save_at is None:
            self._save_at = now + SAVE_INTERVAL_SECONDS
        elif now >= self._save_at:
            self._save_at = now + SAVE_INTERVAL_SECONDS
            self.save(read())

    def save(self, state: bytes) -> None:
        """`state`: JSON; nothing is written when nothing has changed."""
        if state == self._saved:
            return
        file = _File(circumstances=self._circumstances, state=msgspec.Raw(state))
        if self._file.write(msgspec.json.encode(file) + b"\n"):
            self._saved = state
