"""Which experts a model uses to answer given prompts: `s2moe profile`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from s2moe.engine.errors import EngineStartError, RequestError
from s2moe.engine.generation import Generation
from s2moe.engine.hot_experts import HotExperts, ModelIdentity, hot_experts_of, write_atomically
from s2moe.engine.messages import Configure, Generate, Sampling, Speculation
from s2moe.engine.model import Model
from s2moe.engine.native import LibraryNotFoundError, NativeError
from s2moe.engine.native_experts import model_layout
from s2moe.engine.output_file import OutputFileError, check_output
from s2moe.engine.prompt_file import Prompt, PromptFileError, read_prompts

REPORT_EVERY_SECONDS: Final = 5.0
_PROMPTS_FAULT: Final = frozenset({"context_length_exceeded", "template_error", "invalid_value"})
"""Codes of errors that another prompt need not meet."""

Progress = Callable[[str], None]


class ProfileError(Exception):
    """No list could be made; the message is one line with the remedy."""


class RouterCounts:
    """How often the router chose each expert."""

    def __init__(self, n_layer: int, n_expert: int) -> None:
        self._counts = np.zeros((n_layer, n_expert), dtype=np.int64)
        self.n_tokens = 0

    def add(self, ids: npt.NDArray[np.int32]) -> None:
        """`ids` [n_layer, n_tokens, k], negative where nothing was routed."""
        layers, tokens, slots = np.nonzero(ids >= 0)
        np.add.at(self._counts, (layers, ids[layers, tokens, slots]), 1)
        self.n_tokens += ids.shape[1]

    def rows(self, layers: Sequence[int]) -> list[list[int]]:
        """[len(layers)][n_expert]"""
        rows: list[list[int]] = self._counts[list(layers)].tolist()
        return rows


class CountingModel(Model):
    """A model that counts the experts which the tokens of an answer use.

    Prompts are left out: a long one uses nearly every expert, which says nothing about what to keep at hand.
    """

    answering: Generation | None = None
    """Whose tokens are counted."""

    def __init__(self, configure: Configure, on_progress: Callable[[str, float], None]) -> None:
        """Raises EngineStartError, also for a model without experts."""
        # each token must be decoded alone, by all of its experts
        super().__init__(
            msgspec.structs.replace(configure, speculation=Speculation(method="off")), on_progress
        )
        if self.info.n_expert == 0:
            self.close()
            raise EngineStartError(
                "no_experts", f"{configure.model_path} has no experts that could be counted"
            )
        self.counts = RouterCounts(self.info.n_layer, self.info.n_expert)
        self.library.set_router_recording(self.context, record=True)

    def decode(self, tokens: list[int]) -> None:
        super().decode(tokens)
        if self.answering is not None and self.answering.phase == "decode":
            self.counts.add(self.library.router_ids(self.context))


def profile(
    configure: Configure, prompts_path: Path, out: Path, *, max_tokens: int, progress: Progress
) -> HotExperts:
    """Answers the prompts greedily, at most `max_tokens` each, and writes the list to `out`.

    Raises ProfileError.
    """
    try:
        prompts = read_prompts(prompts_path)
    except PromptFileError as error:
        raise ProfileError(f"--prompts: {error}") from error
    try:
        check_output(out)
    except OutputFileError as error:
        raise ProfileError(f"--out: {error}") from error
    try:
        progress(f"loading {configure.model_path}")
        model = CountingModel(configure, lambda _phase, _fraction: None)
        layout = model_layout(model.library, configure.model_path)
    except (EngineStartError, LibraryNotFoundError, NativeError) as error:
        raise ProfileError(str(error)) from error
    except MemoryError as error:
        raise ProfileError("not enough memory to load the model") from error
    try:
        _answer_all(model, prompts, max_tokens, progress)
    finally:
        model.close()
    if model.counts.n_tokens == 0:
        raise ProfileError(f"--prompts: no prompt of {prompts_path} led to an answer of two tokens")
    layers = [layer["layer"] for layer in layout["layers"]]
    counts = [
        row[: layer["n_expert"]]
        for row, layer in zip(model.counts.rows(layers), layout["layers"], strict=True)
    ]
    hot = hot_experts_of(ModelIdentity.of_layout(layout), layers, counts, model.counts.n_tokens)
    try:
        write_atomically(out, hot.to_json())
    except OSError as error:
        raise ProfileError(f"--out: cannot write {out}: {error.strerror}") from error
    return hot


def _answer_all(model: CountingModel, prompts: Sequence[Prompt], max_tokens: int, progress: Progress) -> None:
    """Raises ProfileError when the engine cannot go on; passes over prompts that it refuses."""
    started = time.monotonic()
    report_at = started + REPORT_EVERY_SECONDS
    n_refused = 0
    for number, prompt in enumerate(prompts, 1):
        try:
            _answer(model, prompt, max_tokens)
        except RequestError as error:
            if error.code not in _PROMPTS_FAULT:
                raise ProfileError(f"{prompt.place}: {error.message}") from error
            n_refused += 1
            progress(f"{prompt.place}: passed over: {error.message}")
        now = time.monotonic()
        if now >= report_at or number == len(prompts):
            report_at = now + REPORT_EVERY_SECONDS
            n_tokens = model.counts.n_tokens
            progress(
                f"{number} of {len(prompts)} prompts, {n_tokens} tokens counted, "
                f"{n_tokens / (now - started):.1f} tokens per second"
            )
    if n_refused == len(prompts):
        raise ProfileError("--prompts: none of the prompts could be answered")


def _answer(model: CountingModel, prompt: Prompt, max_tokens: int) -> None:
    """Raises RequestError."""
    request = Generate(
        request_id=prompt.place,
        messages_json=prompt.messages_json,
        sampling=Sampling(temperature=0.0),
        max_tokens=max_tokens,
    )
    model.answering = Generation(model, request)
    try:
        for _ in model.answering.run():
            pass
    finally:
        model.answering = None
