"""What reuse gating costs in quality and saves in experts, along a given text: `s2moe quality`.

The text is cut into windows. Each is evaluated token by token without drafts and gating, which gives the
exact logits, and once per setting as the server would decode it if its answer were this text: the prompt
exactly, then steps of draft and gated verification, where the text decides what is accepted. So drafts are
real ones and rows are gated as in an answer, but each position has an exact counterpart.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from s2moe.engine.divergence import Rows
from s2moe.engine.errors import EngineStartError, RequestError
from s2moe.engine.hot_experts import write_atomically
from s2moe.engine.messages import Configure
from s2moe.engine.model_file import about, check_file
from s2moe.engine.native import Library, LibraryNotFoundError, NativeError, load_llama_cpp
from s2moe.engine.native_experts import model_layout
from s2moe.engine.output_file import OutputFileError, check_output
from s2moe.engine.planned_model import PlannedModel
from s2moe.engine.quality_report import QualityReport, Setting, SettingQuality, Totals
from s2moe.engine.text_walk import Logits, Passed, Walker
from s2moe.engine.text_windows import TextError, Window, cut, read_text

EXACT_PASS: Final = Setting("exact pass", {"method": "off"})
DRAFT_ROOM_TOKENS: Final = 64
"""Context beyond a window, so that drafts do not shrink at its end."""
MAX_TEXT_BYTES: Final = 64 << 20
REPORT_EVERY_SECONDS: Final = 5.0
_COMPARED_ROWS: Final = 16
"""At once: each takes several arrays of the vocabulary's size in double precision."""

Progress = Callable[[str], None]


class QualityError(Exception):
    """Nothing could be measured; the message is one line with the remedy."""


@dataclass(frozen=True)
class Task:
    """What to compare, and on what."""

    model_path: Path
    text_path: Path
    settings: Sequence[Setting]
    """At least one."""
    memory_budget_bytes: int = 0
    """0: what the machine has, less a reserve."""
    n_tokens: int = 2048
    """Of the text, at most."""
    window_tokens: int = 256
    out: Path | None = None
    """Where to write JSON."""

    @property
    def logits_bytes_per_token(self) -> int:
        """Float32 per entry of the vocabulary, of as many windows as are kept at once."""
        return 4 * (len(self.settings) + 2) * self.window_tokens

    def configure(self) -> Configure:
        return Configure(
            model_path=str(self.model_path),
            n_ctx=self.window_tokens + DRAFT_ROOM_TOKENS,
            n_batch=0,
            memory_budget_bytes=self.memory_budget_bytes,
            keep_expert_counts=False,
        )


def settings_of(presets: Sequence[str], budgets: Sequence[float]) -> list[Setting]:
    """Presets by name, then error budgets in place of that of `balanced`."""
    settings = [Setting(preset, {"method": "s2moe", "preset": preset}) for preset in presets]
    return settings + [
        Setting(
            f"budget {100 * budget:g} %", {"method": "s2moe", "preset": "balanced", "error_budget": budget}
        )
        for budget in budgets
    ]


def quality(task: Task, progress: Progress) -> QualityReport:
    """Compares each setting with the exact model and writes the JSON if asked to. Raises QualityError."""
    if task.n_tokens < task.window_tokens:
        raise QualityError(
            f"--tokens {task.n_tokens} is less than one window; give at least {task.window_tokens}, or a "
            "smaller --window"
        )
    try:
        text = read_text(task.text_path, MAX_TEXT_BYTES)
        if task.out is not None:
            check_output(task.out)
        report = _quality(task, text, progress)
        if task.out is not None:
            write_atomically(task.out, json.dumps(report.to_json(), indent=1).encode() + b"\n")
    except TextError as error:
        raise QualityError(f"--text: {error}") from error
    except OutputFileError as error:
        raise QualityError(f"--json: {error}") from error
    except OSError as error:
        raise QualityError(f"--json: cannot write {task.out}: {error.strerror}") from error
    except (EngineStartError, LibraryNotFoundError) as error:
        raise QualityError(str(error)) from error
    except (RequestError, NativeError) as error:
        raise QualityError(f"the evaluation failed: {error.message}") from error
    except MemoryError as error:
        raise QualityError(
            "not enough memory; give a smaller --memory-budget or a smaller --window"
        ) from error
    return report


class ScoringModel(PlannedModel):
    """A model whose logits are compared."""

    def __init__(self, configure: Configure, logits_bytes: int) -> None:
        """`logits_bytes`: what is kept for comparison. It lies outside of a budget that was chosen, so that
        the cache is the server's, and inside of what the machine has. Raises EngineStartError."""
        super().__init__(configure, 0 if configure.memory_budget_bytes else logits_bytes)

    def read_logits(self, index: int) -> Logits:
        """[n_vocab], a view that is valid until the next decode."""
        pointer = self.llama_cpp.llama_get_logits_ith(self.context, index)
        if not pointer:
            raise RequestError("internal", f"the last decode has no logits at {index}")
        return np.ctypeslib.as_array(pointer, shape=(self.info.n_vocab,))


def _quality(task: Task, text: str, progress: Progress) -> QualityReport:
    n_vocab = _check_experts(task.model_path)
    progress(f"loading {task.model_path}")
    model = ScoringModel(task.configure(), task.logits_bytes_per_token * n_vocab)
    try:
        return _measure(model, task, text, progress)
    finally:
        model.close()


def _check_experts(path: Path) -> int:
    """Before the load. Returns the size of the vocabulary. Raises EngineStartError and QualityError."""
    load_llama_cpp()
    check_file(path)
    try:
        layout = model_layout(Library(), path)
    except NativeError as error:
        raise EngineStartError("model_invalid", f"cannot load {about(path, error)}") from error
    if layout["n_expert"] == 0:
        raise QualityError(f"{path} has no experts: there is nothing to gate, its answers are always exact")
    n_vocab: int = layout["n_vocab"]
    return n_vocab


def _measure(model: ScoringModel, task: Task, text: str, progress: Progress) -> QualityReport:
    speculator = model.speculator
    if speculator is None:
        raise QualityError(f"nothing can be drafted for this model: {model.info.speculation_limit}")
    if model.info.longest_piece_bytes:
        text = text[: task.n_tokens * model.info.longest_piece_bytes]
    windows = cut(model, task.text_path, text, n_tokens=task.n_tokens, window_tokens=task.window_tokens)
    walker = Walker(model, speculator, model.info.n_vocab, model.read_logits)
    progress("warming up: costs and confidences are not known yet, and the expert cache is empty")
    walker.walk(windows[0], task.settings[-1].options)
    meter = _Meter((len(task.settings) + 1) * len(windows), progress)
    exact_seconds, collected = walk_all(walker, windows, task.settings, meter.passed)
    n_scored = sum(window.n_scored for window in windows)
    return QualityReport(
        model={
            "name": model.info.name,
            "file": task.model_path.name,
            "architecture": model.info.architecture,
            "n_expert": model.info.n_expert,
            "n_expert_used": model.info.n_expert_used,
        },
        memory=_memory(model),
        text={
            "file": task.text_path.name,
            "n_windows": len(windows),
            "window_tokens": task.window_tokens,
            "n_prompt_tokens": windows[0].n_prompt,
            "n_scored": n_scored,
        },
        build=model.info.system_fingerprint,
        exact_tokens_per_second=n_scored / exact_seconds,
        settings=[each.quality() for each in collected],
    )


def _memory(model: PlannedModel) -> dict[str, Any]:
    plan = model.plan
    if plan is None:
        return {"budget_bytes": 0, "n_slots": 0, "n_experts": 0}
    return {
        "budget_bytes": plan.budget.n_bytes,
        "n_slots": plan.n_slots,
        "n_experts": plan.layout.n_experts_total,
    }


@dataclass
class Collected:
    """What a setting has given so far."""

    setting: Setting
    rows: list[Rows] = field(default_factory=list)
    n_biased: list[npt.NDArray[np.int32]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, window: Window, passed: Passed, exact: Logits) -> None:
        following = window.tokens[window.n_prompt + 1 :]
        for start in range(0, len(following), _COMPARED_ROWS):
            part = slice(start, start + _COMPARED_ROWS)
            self.rows.append(Rows.compare(exact[part], passed.logits[part], following[part]))
        self.n_biased.append(passed.n_biased)
        self.reports.append(passed.report)
        self.seconds += passed.seconds

    def quality(self) -> SettingQuality:
        return SettingQuality(
            setting=self.setting,
            rows=Rows.concatenate(self.rows),
            n_biased=np.concatenate(self.n_biased),
            totals=Totals(self.reports),
            seconds=self.seconds,
        )


def walk_all(
    walker: Walker,
    windows: Sequence[Window],
    settings: Sequence[Setting],
    on_pass: Callable[[Window, Setting], None],
) -> tuple[float, list[Collected]]:
    """Every window exactly and with every setting. Returns the seconds of the exact passes, and the rest.

    No window is evaluated twice in a row, unless there is but one: setting i follows i + 1 windows behind the
    exact pass. Else the expert cache would hold just what the window needs, as it never does for new text.
    """
    exact_seconds = 0.0
    exact: dict[int, Logits] = {}
    collected = [Collected(setting) for setting in settings]
    for turn in range(len(windows) + len(settings)):
        if turn < len(windows):
            passed = walker.walk(windows[turn], EXACT_PASS.options)
            exact[turn] = passed.logits
            exact_seconds += passed.seconds
            on_pass(windows[turn], EXACT_PASS)
        for lag, each in enumerate(collected, 1):
            number = turn - lag
            if 0 <= number < len(windows):
                each.add(windows[number], walker.walk(windows[number], each.setting.options), exact[number])
                on_pass(windows[number], each.setting)
        exact.pop(turn - len(settings), None)
    return exact_seconds, collected


class _Meter:
    """Says now and then how far the passes are."""

    def __init__(self, n_passes: int, progress: Progress) -> None:
        self._n_passes = n_passes
        self._progress = progress
        self._n_done = 0
        self._n_tokens = 0
        self._started = time.monotonic()
        self._report_at = self._started + REPORT_EVERY_SECONDS

    def passed(self, window: Window, setting: Setting) -> None:
        self._n_done += 1
        self._n_tokens += window.n_scored
        now = time.monotonic()
        if now < self._report_at and self._n_done < self._n_passes:
            return
        self._report_at = now + REPORT_EVERY_SECONDS
        seconds = now - self._started
        left = seconds / self._n_done * (self._n_passes - self._n_done)
        self._progress(
            f"{self._n_done} of {self._n_passes} passes ({setting.name}), "
            f"{self._n_tokens / seconds:.1f} tokens per second, about {left:.0f} s left"
        )
