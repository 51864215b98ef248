"""Filling the expert cache at start with what was used before, and remembering what is used now."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from s2moe.engine.cache_directory import cache_directory
from s2moe.engine.errors import EngineStartError
from s2moe.engine.expert_history import CountsSource, ExpertHistory
from s2moe.engine.hot_experts import HotExperts, HotExpertsError, ModelIdentity, read_hot_experts
from s2moe.engine.messages import Configure
from s2moe.engine.native import NativeError

logger = logging.getLogger(__name__)

_UNUSED_SHARE = 1000
"""One use counts as much as that many experts that were not used."""


class WarmableExperts(CountsSource, Protocol):
    """What a warm start does to an expert cache; `native_experts.Experts` is one."""

    def warm(self, counts: Sequence[Sequence[int]]) -> None:
        """Fills empty slots in the background, [len(layers)][n_experts], the most used first."""
        ...


class WarmStart:
    """One for each loaded model that has an expert cache."""

    def __init__(
        self,
        experts: WarmableExperts,
        model: ModelIdentity,
        configure: Configure,
        *,
        every_expert_fits: bool = False,
    ) -> None:
        """Reads what --hot-experts names, and the counts of earlier runs. Raises EngineStartError when
        the former cannot be used, or when --expert-policy static has neither.

        `every_expert_fits`: all are read, the most used first.
        """
        self._experts = experts
        self._every_expert_fits = every_expert_fits
        self._is_static = configure.expert_policy == "static"
        self._hot: HotExperts | None = None
        if configure.hot_experts_path is not None:
            try:
                self._hot = read_hot_experts(Path(configure.hot_experts_path), model)
            except HotExpertsError as error:
                raise EngineStartError("hot_experts_invalid", f"--hot-experts: {error}") from error
        self._history = _open_history(experts, model) if configure.keep_expert_counts else None
        self._kept = None if self._history is None else self._history.load()
        if self._is_static:
            self._check_static()

    def _check_static(self) -> None:
        if self._hot is None and self._kept is None and not self._every_expert_fits:
            raise EngineStartError(
                "hot_experts_missing",
                "--expert-policy static keeps a fixed list of experts in memory, and there is none: name one "
                "with --hot-experts (`s2moe profile` writes it), or omit --expert-policy",
            )
        logger.warning(
            "--expert-policy static is for comparison: a fixed list of experts stays in memory, every other "
            "one is read at each use; omit it for speed"
        )

    def begin(self) -> None:
        """Starts to fill the cache, from the list or else from earlier runs; returns at once."""
        hot = self._hot or self._kept
        experts = self._experts
        if hot is not None:
            table = hot.table(experts.layers, experts.n_experts)
        elif self._every_expert_fits:
            table = [[0] * experts.n_experts for _ in experts.layers]
        else:
            logger.info("the expert cache starts cold: no --hot-experts and no counts of earlier runs")
            return
        n_used = sum(count > 0 for row in table for count in row)
        if self._every_expert_fits or self._is_static:
            # only ratios matter: those that were never used come last, but they come
            table = [[_UNUSED_SHARE * count + 1 for count in row] for row in table]
        try:
            experts.warm(table)
        except NativeError as error:
            logger.warning("the expert cache starts cold: %s", error)
            return
        logger.info("the expert cache is being warmed: %s", self._warming_text(n_used))

    def _warming_text(self, n_used: int) -> str:
        """`n_used`: experts that were used at all."""
        source = "--hot-experts" if self._hot is not None else "the counts of earlier runs"
        if self._is_static and not self._every_expert_fits:
            return f"as many as fit stay for ever, the most used according to {source}"
        if not self._every_expert_fits:
            return f"{n_used} experts were used according to {source}, the most used come first"
        if not n_used:
            return "every expert is read"
        return f"every expert is read, first the {n_used} that were used according to {source}"

    def keep(self) -> None:
        """Writes down now and then what was used. Not during a decode."""
        if self._history is not None:
            self._history.save_if_due(time.monotonic())

    def close(self) -> None:
        """Writes down what was used since. Before the cache is freed."""
        if self._history is not None:
            self._history.save()


def _open_history(experts: WarmableExperts, model: ModelIdentity) -> ExpertHistory | None:
    try:
        return ExpertHistory(experts, model, cache_directory())
    except RuntimeError as error:
        logger.warning("expert counts are not kept, for want of a cache directory: %s", error)
        return None
