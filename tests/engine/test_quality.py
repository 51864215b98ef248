"""`s2moe quality`: which rows are compared with which, and what it says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from s2moe.engine.errors import RequestError
from s2moe.engine.native_speculation import CommittedRow
from s2moe.engine.quality import EXACT_PASS, Collected, settings_of, walk_all
from s2moe.engine.quality_report import QualityReport, Setting, SettingQuality, Totals, markdown_table
from s2moe.engine.text_walk import Logits, Walker
from s2moe.engine.text_windows import Window

from undraftable_models import write_dense_model

N_VOCAB = 11
TEXT = Path(__file__).parents[1] / "data" / "chat-eval.txt"

REPORT: dict[str, Any] = {
    "disabled_reason": "",
    "n_steps": 10, "n_iterations": 4, "n_tokens": 16, "n_drafted": 12, "n_admitted": 8, "n_accepted": 6,
    "n_experts_touched": 90, "n_experts_exact": 100,
    "n_row_experts": 80, "n_touched_multi": 40, "n_exact_multi": 50,
    "n_missing": 6, "n_missing_exact": 10, "displaced_weight": 2.0, "n_token_layers": 64,
    "n_committed_rows": 16, "n_biased_rows": 5,
    "draft_seconds": 0.25, "verify_seconds": 0.75, "stall_seconds": 0.125,
}  # fmt: skip


class FakeDecoder:
    """A KV cache that says what it holds, and logits that say where they come from."""

    n_batch = 3

    def __init__(self) -> None:
        self.kv_tokens: list[int] = []
        self.decodes: list[list[int]] = []

    def forget(self) -> None:
        self.kv_tokens.clear()

    def decode(self, tokens: list[int]) -> None:
        self.decodes.append(list(tokens))
        self.kv_tokens += tokens


class FakeSpeculator:
    """Commits 1, 2, 3, 1, … rows; those behind the root are biased, unless the method is off.

    The logits of a row are a function of all tokens up to it, and of the strength of the bias.
    """

    def __init__(self, model: FakeDecoder) -> None:
        self._model = model
        self.options: Mapping[str, Any] = {}
        self.begun: list[tuple[list[int], Mapping[str, Any]]] = []
        self._n_steps = 0
        self._rows: dict[int, Logits] = {}
        self._committed: list[CommittedRow] = []
        self.fail_after: int | None = None

    def begin(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.begun.append((list(self._model.kv_tokens), options))
        self._n_steps = 0

    def follow(self, root: int, position: int, text: Sequence[int]) -> int:
        assert position == len(self._model.kv_tokens)
        if self._n_steps == self.fail_after:
            raise RequestError("model_file_error", "decode failed: the drive is gone")
        off = self.options["method"] == "off"
        n_rows = 1 if off else min(1 + self._n_steps % 3, len(text))
        self._n_steps += 1
        self._rows.clear()
        self._committed = []
        for depth, token in enumerate([root, *text[: n_rows - 1]]):
            self._model.kv_tokens.append(token)
            index = 5 + 2 * depth
            bias = 0.0 if off or depth == 0 else float(self.options.get("error_budget", 0))
            self._rows[index] = expected_logits(self._model.kv_tokens, bias)
            self._committed.append(CommittedRow(index, depth, 0 if bias == 0 else 3))
        return n_rows

    def rows(self) -> list[CommittedRow]:
        return self._committed

    def report(self) -> dict[str, Any]:
        return dict(REPORT)

    def read_logits(self, index: int) -> Logits:
        return self._rows[index]


def expected_logits(tokens: Sequence[int], bias: float) -> Logits:
    generator = np.random.default_rng(list(tokens))
    logits = generator.normal(size=N_VOCAB).astype(np.float32)
    return logits + np.float32(bias) * generator.normal(size=N_VOCAB).astype(np.float32)


def fake_walker() -> tuple[FakeDecoder, FakeSpeculator, Walker]:
    model = FakeDecoder()
    speculator = FakeSpeculator(model)
    return model, speculator, Walker(model, speculator, N_VOCAB, speculator.read_logits)


def window_of(seed: int, n_tokens: int = 20, n_prompt: int = 4) -> Window:
    return Window(np.random.default_rng(seed).integers(0, N_VOCAB, n_tokens).tolist(), n_prompt)


def test_each_position_gets_the_row_that_was_committed_there() -> None:
    model, speculator, walker = fake_walker()
    window = window_of(1)
    options = {"method": "s2moe", "error_budget": 0.5}
    passed = walker.walk(window, options)
    assert model.decodes == [window.tokens[:3], window.tokens[3:4]]
    assert speculator.begun == [(window.tokens[:4], options)]
    assert passed.logits.shape == (15, N_VOCAB)
    # steps of 1, 2, 3, 1, 2, 3, 1, 2 rows
    biased = [False, *[False, True], *[False, True, True]] * 2 + [False, *[False, True]]
    assert (passed.n_biased > 0).tolist() == biased
    for number, is_biased in enumerate(biased):
        tokens = window.tokens[: window.n_prompt + number + 1]
        assert passed.logits[number].tolist() == expected_logits(tokens, 0.5 * is_biased).tolist(), number
    assert model.kv_tokens == []


def test_the_kv_cache_is_empty_after_a_failure() -> None:
    model, speculator, walker = fake_walker()
    speculator.fail_after = 2
    with pytest.raises(RequestError, match="the drive is gone"):
        walker.walk(window_of(1), {"method": "off"})
    assert model.kv_tokens == []


def test_gated_rows_are_compared_with_exact_ones_of_the_same_position() -> None:
    _, _, walker = fake_walker()
    window = window_of(2)
    exact = walker.walk(window, EXACT_PASS.options)
    collected = Collected(Setting("gated", {"method": "s2moe", "error_budget": 0.5}))
    collected.add(window, walker.walk(window, collected.setting.options), exact.logits)
    parts = collected.quality().parts
    assert parts["unbiased"] is not None
    assert parts["biased"] is not None
    assert parts["all"] is not None
    assert (parts["unbiased"].mean_kl, parts["unbiased"].perplexity_ratio) == (0, 1)
    assert parts["biased"].mean_kl > 0.01
    assert parts["unbiased"].n_rows + parts["biased"].n_rows == parts["all"].n_rows == window.n_scored
    # the text's own tokens are the ones whose probability counts
    losses = [
        -np.log(np.exp(row)[token] / np.exp(row).sum())
        for row, token in zip(exact.logits, window.tokens[5:], strict=True)
    ]
    assert parts["all"].reference_perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)


def test_no_window_is_evaluated_twice_in_a_row() -> None:
    _, speculator, walker = fake_walker()
    windows = [window_of(seed) for seed in range(5)]
    settings = settings_of(["exact", "fast"], [0.25])
    passes: list[tuple[int, str]] = []
    _, collected = walk_all(
        walker, windows, settings, lambda window, each: passes.append((windows.index(window), each.name))
    )
    assert len(passes) == len(set(passes)) == 5 * 4
    assert all(first[0] != second[0] for first, second in pairwise(passes))
    for name in ("exact pass", "exact", "fast", "budget 25 %"):
        assert [number for number, each in passes if each == name] == [0, 1, 2, 3, 4]
    assert [len(each.quality().rows) for each in collected] == [5 * 15] * 3
    # pairing a window with the logits of another would show
    assert collected[0].quality().rows.kl.max() == 0
    assert collected[2].quality().rows.kl.max() > 0
    assert len(speculator.begun) == 20


def test_settings_are_presets_and_budgets() -> None:
    assert [(each.name, dict(each.options)) for each in settings_of(["fast"], [0, 0.025])] == [
        ("fast", {"method": "s2moe", "preset": "fast"}),
        ("budget 0 %", {"method": "s2moe", "preset": "balanced", "error_budget": 0}),
        ("budget 2.5 %", {"method": "s2moe", "preset": "balanced", "error_budget": 0.025}),
    ]


def report_on(reports: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> QualityReport:
    _, _, walker = fake_walker()
    window = window_of(3)
    exact = walker.walk(window, EXACT_PASS.options)
    collected = Collected(Setting("named", options), seconds=0.5)
    collected.add(window, walker.walk(window, options), exact.logits)
    quality = collected.quality()
    return QualityReport(
        model={"name": "Fake", "file": "fake.gguf"},
        memory={"budget_bytes": 0, "n_slots": 12, "n_experts": 64},
        text={"file": "text.txt", "n_windows": 1, "window_tokens": 20, "n_scored": 15},
        build="b1",
        exact_tokens_per_second=20.0,
        settings=[
            SettingQuality(quality.setting, quality.rows, quality.n_biased, Totals(reports), seconds=0.5)
        ],
    )


def test_shares_are_of_the_sums_over_windows() -> None:
    other = {**REPORT, "n_row_experts": 20, "n_touched_multi": 20, "n_missing": 0, "disabled_reason": "error"}
    report = report_on([REPORT, other, other], {"method": "s2moe", "error_budget": 0.5})
    (found,) = report.to_json()["settings"]
    assert (found["reuse_ratio"], found["reuse_ratio_ungated"]) == (80 / 120, 150 / 120)
    assert found["misses_avoided"] == 30 - 6
    assert found["misses_avoided_share"] == 24 / 30
    assert found["displaced_weight"] == 6 / 192
    assert found["acceptance_length"] == 2.5
    assert found["mean_tokens_per_step"] == 1.6
    assert found["tokens_per_second"] == 30
    assert found["disabled_reasons"] == ["error"]
    assert found["biased_share"] == pytest.approx(7 / 15)
    assert json.loads(json.dumps(report.to_json())) == report.to_json()


def test_tables_show_rows_apart_and_a_dash_for_nothing() -> None:
    nothing = dict.fromkeys(REPORT, 0) | {"disabled_reason": ""}
    lines = report_on([nothing], {"method": "off"}).lines()
    assert lines[0] == ("Fake: 15 positions of text.txt (1 × 20 tokens); 12 of 64 experts fit")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[2][:6] == ["named", "all", "15", "0.0000", "0.00 %", "100.0 ± 0.0 %"]
    assert cells[2][7] == "1.0000 ×"
    assert cells[3] == ["named", "biased", "0", *["–"] * 5]
    assert cells[7] == ["named", "0.0 %", "–", "–", "–", "0 (–)", "–", "–", "30.0", "1.50 ×"]


def test_table_columns_are_aligned() -> None:
    lines = markdown_table(("a", "b", "n"), [("long name", "x", "1"), ("y", "z", "23")])
    assert lines[1] == "| --------- | - | -: |"
    assert lines[2:] == ["| long name | x |  1 |", "| y         | z | 23 |"]


# the command


def run_quality(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "s2moe.server", "quality", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_usage_errors_are_one_line(tmp_path: Path) -> None:
    model, text = tmp_path / "m.gguf", tmp_path / "t.txt"
    model.write_text("hello")
    text.write_text("Hello there.")
    good: list[object] = ["--model", model, "--text", text]
    cases: list[tuple[list[object], int, str]] = [
        (["--model", model], 2, "--text"),
        ([*good, "--preset", "best"], 2, "exact,balanced,fast"),
        ([*good, "--preset", "fast,fast"], 2, "once at most"),
        ([*good, "--budgets", "0.1,2"], 2, "from 0 to 1"),
        ([*good, "--budgets", "nan"], 2, "from 0 to 1"),
        ([*good, "--budgets", "much"], 2, "from 0 to 1"),
        ([*good, "--window", 31], 2, "less than 32"),
        ([*good, "--tokens", 100], 1, "--tokens 100 is less than one window; give at least 256"),
        (["--model", model, "--text", tmp_path / "none"], 1, "none cannot be read: No such file"),
        ([*good, "--json", tmp_path / "no" / "x"], 1, "--json: "),
        ([*good], 1, "is not a GGUF file"),
        (["--model", tmp_path / "x", "--text", text], 1, "does not exist"),
    ]
    for arguments, code, reason in cases:
        done = run_quality(*arguments)
        assert done.returncode == code, done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("s2moe: error: ")
        assert reason in last
        assert done.stdout == ""


def test_a_dense_model_has_nothing_to_gate(tmp_path: Path) -> None:
    model = tmp_path / "dense.gguf"
    write_dense_model(model)
    done = run_quality("--model", model, "--text", TEXT)
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"s2moe: error: {model} has no experts: there is nothing to gate, its answers are always exact\n"
    )


def test_a_text_shorter_than_a_window_is_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("A few words.")
    done = run_quality("--model", tiny_model_path, "--text", text)
    assert done.returncode == 1
    assert f"--text: {text} has " in done.stderr.splitlines()[-1]
    assert "do not fill one window of 256" in done.stderr.splitlines()[-1]


def test_exact_differs_in_nothing_and_gating_keeps_its_budget(tiny_model_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "quality.json"
    arguments: list[object] = ["--model", tiny_model_path, "--text", TEXT, "--json", out]
    arguments += ["--tokens", 256, "--window", 128, "--preset", "exact,fast", "--memory-budget", "320MiB"]
    done = run_quality(*arguments)
    assert done.returncode == 0, done.stderr
    assert "6 of 6 passes" in done.stderr
    found = json.loads(out.read_text())
    assert found["text"] == {
        **{"file": TEXT.name, "n_windows": 2, "window_tokens": 128},
        **{"n_prompt_tokens": 16, "n_scored": 222},
    }
    assert 0 < found["memory"]["n_slots"] < found["memory"]["n_experts"] == 240
    exact, fast = found["settings"]
    assert exact["rows"]["all"]["n_rows"] == fast["rows"]["all"]["n_rows"] == 222
    for name in ("mean_kl", "rms_delta_p"):
        assert exact["rows"]["all"][name] == 0
        assert fast["rows"]["all"][name] > 0
    assert exact["rows"]["all"]["same_top1"] == exact["rows"]["all"]["perplexity_ratio"] == 1
    assert (exact["biased_share"], exact["displaced_weight"]) == (0, 0)
    assert exact["reuse_ratio"] == exact["reuse_ratio_ungated"]
    assert fast["biased_share"] > 0
    assert 0 < fast["displaced_weight"] <= 0.2 + 1e-6
    assert fast["misses_avoided"] > 0
    for each in (exact, fast):
        assert each["totals"]["n_committed_rows"] == 222
        assert each["totals"]["n_biased_rows"] == round(222 * each["biased_share"])
        assert each["disabled_reasons"] == []
    assert "| fast " in done.stdout
