"""The prompt cache that a configuration asks for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from s2moe.engine.errors import EngineStartError
from s2moe.engine.memory import available_bytes
from s2moe.engine.messages import Configure
from s2moe.engine.plan import (
    AUTO_PROMPT_CACHE,
    AUTO_PROMPT_CACHE_DIVISOR,
    MAX_AUTO_PROMPT_CACHE_BYTES,
    MemoryPlan,
)
from s2moe.engine.prompt_cache import PromptCache
from s2moe.engine.sequence_state import SequenceState
from s2moe.engine.snapshot_files import SnapshotFiles, SnapshotIdentity, fingerprint

logger = logging.getLogger(__name__)


def create_prompt_cache(
    configure: Configure,
    sequence: SequenceState,
    plan: MemoryPlan | None,
    *,
    layout: Callable[[], Mapping[str, Any]],
    llama_build: str,
    kv_types: str,
    hardware: str,
    meta: Callable[[str], str],
) -> PromptCache:
    """`layout`: the object of s2moe_model_layout(); `hardware`: where rows have the same
    bits; `meta`: a value of the model's metadata, "" = none.

    Raises EngineStartError.
    """
    budget_bytes = _budget_bytes(configure, plan)
    directory = configure.prompt_cache_dir
    if directory is None:
        return PromptCache(sequence, budget_bytes)
    if budget_bytes == 0:
        _refuse_useless_directory(configure)
        return PromptCache(sequence, 0)
    events = Counter[str]()
    try:
        identity = SnapshotIdentity(
            model=fingerprint([file["path"] for file in layout()["files"]]),
            llama_build=llama_build,
            kv_types=kv_types,
            rope=_rope(sequence.n_ctx, meta),
            hardware=hardware,
        )
        files = SnapshotFiles(Path(directory), identity, budget_bytes, events)
    except OSError as error:
        raise EngineStartError(
            "prompt_cache_dir_unusable",
            f"--prompt-cache-dir: {error.filename or directory} cannot be used: {error.strerror or error}; "
            "choose a directory that the server may write",
        ) from error
    logger.info("%d conversations of earlier runs can be taken up from %s", len(files.entries), directory)
    return PromptCache(sequence, budget_bytes, files, events=events)


def _budget_bytes(configure: Configure, plan: MemoryPlan | None) -> int:
    if plan is not None:
        return plan.prompt_cache_bytes
    if configure.prompt_cache_bytes != AUTO_PROMPT_CACHE:
        return configure.prompt_cache_bytes
    # beside a GPU nothing is planned
    return min(MAX_AUTO_PROMPT_CACHE_BYTES, available_bytes() // AUTO_PROMPT_CACHE_DIVISOR)


def _refuse_useless_directory(configure: Configure) -> None:
    """Raises EngineStartError where the operator chose both."""
    if configure.prompt_cache_bytes == 0:
        raise EngineStartError(
            "invalid_setting",
            "--prompt-cache-dir needs a prompt cache, but --prompt-cache-size is 0; omit one of them",
        )
    logger.warning(
        "--prompt-cache-dir is not used: the memory budget leaves nothing for a prompt cache; set "
        "--prompt-cache-size to take it from the experts, or raise --memory-budget"
    )


def _rope(n_ctx: int, meta: Callable[[str], str]) -> str:
    """Some models encode positions in another way where the context is longer than they were first trained
    for."""
    trained = meta(f"{meta('general.architecture')}.rope.scaling.original_context_length")
    if not trained.isdecimal():
        return ""
    return "long" if n_ctx > int(trained) else "short"
