"""How often a model's experts were used in earlier runs, kept in the cache directory."""

from __future__ import annotations

import logging
import statistics
from pathlib import Path
from typing import Final, Protocol

from s2moe.engine.hot_experts import (
    HotExperts,
    HotExpertsError,
    ModelIdentity,
    hot_experts_of,
    read_hot_experts,
)
from s2moe.engine.kept_file import KeptFile

logger = logging.getLogger(__name__)

HALF_LIFE_TOKENS: Final = 20_000
"""After so many generated tokens a use counts half, so that old habits fade."""
SAVE_INTERVAL_SECONDS: Final = 300.0


class CountsSource(Protocol):
    """What is read of an expert cache; `native_experts.Experts` is one."""

    layers: tuple[int, ...]
    """The layers of the model that have experts."""
    n_experts: int

    def counts(self) -> list[list[int]]:
        """Uses since the cache was opened, [len(layers)][n_experts]. Not during a decode."""
        ...


class ExpertHistory:
    """Uses of one model's experts over all runs, each weighted by 0.5^(tokens generated since / half-life).

    Problems with the file are logged once and never raised: a server without history is only colder.
    """

    def __init__(self, experts: CountsSource, model: ModelIdentity, directory: Path) -> None:
        self._experts = experts
        self._model = model
        name = model.fingerprint.removeprefix("sha256:")[:32]
        self.path = directory / "experts" / f"{name}.json"
        self._counts = [[0.0] * experts.n_experts for _ in experts.layers]
        self._tokens = 0.0
        self._seen = [[0] * experts.n_experts for _ in experts.layers]
        self._save_at: float | None = None
        self._file = KeptFile(self.path, "expert counts")

    def load(self) -> HotExperts | None:
        """What earlier runs left; None when there is nothing of use.

        Call once, before the first request: uses until now, as of the decode that tries a model out, are
        nobody's habit.
        """
        self._seen = self._experts.counts()
        try:
            hot = read_hot_experts(self.path, self._model)
        except HotExpertsError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                logger.warning("expert counts of earlier runs are ignored: %s", error)
            return None
        table = hot.table(self._experts.layers, self._experts.n_experts)
        self._counts = [[float(count) for count in row] for row in table]
        self._tokens = float(hot.tokens)
        return hot

    def save_if_due(self, now: float) -> None:
        """Saves every SAVE_INTERVAL_SECONDS; `now` is on any steady clock. Not during a decode."""
        if self._save_at is None:
            self._save_at = now + SAVE_INTERVAL_SECONDS
        elif now >= self._save_at:
            self._save_at = now + SAVE_INTERVAL_SECONDS
            self.save()

    def save(self) -> None:
        """Adds what was used since the last save and writes the file. Not during a decode."""
        if not self._add_new_uses():
            return
        hot = hot_experts_of(self._model, self._experts.layers, self._counts, self._tokens)
        self._file.write(hot.to_json())

    def _add_new_uses(self) -> bool:
        """Returns whether there were any."""
        seen, self._seen = self._seen, self._experts.counts()
        new = [
            [now - before for before, now in zip(old_row, new_row, strict=True)]
            for old_row, new_row in zip(seen, self._seen, strict=True)
        ]
        if not any(map(any, new)):
            return False
        # the median, since the last layer of a model routes only tokens whose logits are wanted
        tokens = statistics.median(map(sum, new)) / max(1, self._model.n_expert_used)
        fade = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self._tokens = self._tokens * fade + tokens
        self._counts = [
            [kept * fade + added for kept, added in zip(kept_row, added_row, strict=True)]
            for kept_row, added_row in zip(self._counts, new, strict=True)
        ]
        return True
