"""What is said about measured pairs: samples, goals, tables, plots, flags."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from speculation_rig import FakeServer, answer_of, options_of, pairs_of, results_of

from s2moe.bench.prompts import prompts
from s2moe.bench.speculation import __main__ as command
from s2moe.bench.speculation import hot_list
from s2moe.bench.speculation.cost_fit import CostFitError, fit_of
from s2moe.bench.speculation.goals import judge
from s2moe.bench.speculation.methods import MethodError, method_named
from s2moe.bench.speculation.plots import draw_all, predictions
from s2moe.bench.speculation.quality_file import Agreement, Agreements, QualityFileError, read_agreement
from s2moe.bench.speculation.report import markdown
from s2moe.bench.speculation.results import CellKey, Pair, Results, Sample
from s2moe.engine.prompt_file import read_prompts

Cells = dict[CellKey, list[Pair]]


NO_AGREEMENT = Agreements()


def verdicts(results: Results, **agreement: float) -> dict[str, bool | None]:
    """`agreement`: at 1,050 MiB, by method."""
    cells = {(name, 1050): Agreement(share) for name, share in agreement.items()}
    return {line.what: line.passed for line in judge(results, Agreements({**cells}))}


def measured(results: Results, agreement: Agreements = NO_AGREEMENT) -> dict[str, str]:
    return {line.what: line.measured for line in judge(results, agreement)}


def verdict(results: Results, begin: str, **agreement: float) -> bool | None:
    """Of the only line that begins so."""
    (found,) = [passed for what, passed in verdicts(results, **agreement).items() if what.startswith(begin)]
    return found


# samples


def test_the_first_token_is_not_timed_and_neither_is_the_prompt() -> None:
    timings = {"prompt_ms": 5e4, "predicted_expert_read_bytes": 6300.0, "predicted_expert_stall_ms": 500.0}
    sample = Sample.of(answer_of(2.0, n_tokens=64, **timings, speculation={"misses_avoided": 126}))
    assert sample.seconds_per_token == pytest.approx(2.0 / 63)
    assert sample.read_bytes_per_token == pytest.approx(100)
    assert sample.stall_share == pytest.approx(0.25)
    assert sample.per_token("misses_avoided") == pytest.approx(2)
    assert sample.misses_per_token is None, "a model without an expert cache has none"


def test_short_answers_are_kept_but_do_not_count() -> None:
    results = results_of({(1050, "qa", "exact"): [*pairs_of(2.0), *pairs_of(9.0, n_tokens=8)]})
    assert results.ratios("exact") == pytest.approx([2.0])
    assert "1 pairs with a short answer do not count" in markdown(results, [])


def test_pairs_survive_the_file(tmp_path: Path) -> None:
    pairs = pairs_of(1.5, 1.2, reuse_ratio=0.5, controller_state="drafting", unknown=1)
    results = results_of({(None, "rag", "fast"): pairs, (1050, "qa", "exact"): pairs_of(1.0)})
    results.fits["1050 MiB, shared"] = {"r2": 0.96, "mape": 0.04, "n": 256}
    results.save(tmp_path / "out.json")
    assert Results.load(tmp_path / "out.json") == results
    assert pairs[0].method.speculation == {"reuse_ratio": 0.5, "controller_state": "drafting"}


# goals


@pytest.mark.parametrize(
    ("ratios", "outcome", "passed"),
    [
        ((1.0, 1.01, 1.0), "shown", True),
        ((0.9, 0.91, 0.9), "missed", False),
        ((1.0, 1.0, 0.9), "not shown", None),
        ((1.5,), "not shown", None),
        ((0.5,), "not shown", None),
    ],
)
def test_a_cell_is_shown_missed_or_not_shown(
    ratios: tuple[float, ...], outcome: str, passed: bool | None
) -> None:
    results = results_of({(1050, "qa", "exact"): pairs_of(*ratios)})
    assert verdict(results, "exact: 1 cells") is passed
    assert f"1 {outcome}" in measured(results)["exact: 1 cells"]
    assert f"| 1050 MiB, qa | {outcome}: " in markdown(results, [])
    named = "exact: 1050 MiB, qa" in measured(results)
    assert named is (outcome == "missed")


def test_one_missed_cell_is_enough_and_others_do_not_hide_it() -> None:
    cells: Cells = {
        (1050, "qa", "exact"): pairs_of(1.5, 1.5),
        (1050, "rag", "exact"): pairs_of(0.9, 0.9),
        (1050, "code", "exact"): pairs_of(1.5),
    }
    lines = measured(results_of(cells))
    assert lines["exact: 3 cells"] == "1 shown, 1 missed, 1 not shown"
    assert lines["exact: 1050 MiB, rag"] == "missed: 0.900 (0.900 to 0.900; 2 pairs) × off"
    assert verdict(results_of(cells), "exact: 3 cells") is False


def test_a_cell_without_a_pair_that_counts_is_named() -> None:
    cells: Cells = {(1050, "qa", "exact"): pairs_of(9.0, 9.0, n_tokens=8)}
    results = results_of({**cells, (1500, "qa", "exact"): pairs_of(1.5, 1.5)})
    lines = measured(results)
    assert lines["exact: 2 cells"] == "1 shown, 0 missed, 1 not shown"
    assert lines["exact: 1050 MiB, qa"] == "not shown: no pair counts"
    assert "| 1050 MiB, qa | no pair counts |" in markdown(results, [])


def test_means_over_cells_are_judged_where_there_are_ten_pairs() -> None:
    slow = pairs_of(*([0.9, 0.91] * 3))
    cells: Cells = {
        (1050, "qa", "exact"): pairs_of(*([1.1, 1.12] * 3)),
        (1050, "rag", "exact"): pairs_of(*([1.1, 1.12] * 3)),
        (1500, "qa", "exact"): slow,
        (1500, "rag", "exact"): slow,
    }
    results = results_of(cells)
    assert verdict(results, "exact: mean of 1050 MiB") is True
    assert verdict(results, "exact: mean of 1500 MiB") is False
    assert verdict(results, "exact: mean of qa") is None
    assert measured(results)["exact: mean of all cells"].endswith("24 pairs) × off")
    few = results_of({(1050, "qa", "exact"): pairs_of(1.1, 1.1)})
    assert verdict(few, "exact: mean of 1050 MiB") is None
    assert measured(few)["exact: mean of 1050 MiB"].endswith("2 pairs) × off, fewer than 10")


def test_speed_is_judged_at_the_drive_bound_limits_only() -> None:
    cells: Cells = {(1050, "qa", "exact"): pairs_of(1.2, 1.2), (None, "qa", "exact"): pairs_of(1.0, 1.0)}
    assert verdict(results_of(cells), "exact: geometric mean at 1050 MiB") is True
    cells[2100, "qa", "exact"] = pairs_of(1.0, 1.0)
    assert verdict(results_of(cells), "exact: geometric mean at 1050, 2100 MiB") is False


def test_agreement_is_part_of_the_goal_and_said_to_be_missing() -> None:
    results = results_of({(1050, "qa", "balanced"): pairs_of(1.4, 1.4)})
    what = "balanced: top-1 agreement"
    assert verdict(results, what, balanced=0.94) is True
    assert verdict(results, what, balanced=0.92) is False
    assert verdict(results, what) is None
    assert "not measured (--quality)" in markdown(results, judge(results, NO_AGREEMENT))


def test_agreement_is_judged_by_the_worst_limit_and_limits_without_a_file_are_named() -> None:
    results = results_of({(limit, "qa", "balanced"): pairs_of(1.4, 1.4) for limit in (1050, 1500, 2100)})
    agreement = Agreements(
        {("balanced", 1050): Agreement(0.92, 444), ("balanced", 1500): Agreement(0.95, 444)}
    )
    lines = {line.what: line for line in judge(results, agreement)}
    worst = lines["balanced: top-1 agreement on committed tokens at 1050 MiB, the least of 2 limits"]
    assert worst.passed is False
    assert worst.measured == "92.0 % (standard error 1.3, 444 positions)"
    assert lines["balanced: agreement at 2100 MiB"].measured == "not measured (--quality)"


def test_two_names_of_one_setting_are_pooled_in_the_cells_of_both() -> None:
    cells: Cells = {
        (1050, "qa", "exact"): pairs_of(1.2, 1.2),
        (1050, "rag", "exact"): pairs_of(4.0, 4.0),
        (1050, "qa", "no-reuse-gating"): pairs_of(1.0, 1.0),
    }
    results = results_of(cells)
    what = "exact and no-reuse-gating, one setting, in the cells of both"
    assert measured(results)[what].startswith("1.10 (")
    text = markdown(results, [])
    assert "| exact and no-reuse-gating, one setting: the cells of both | 1.10 (" in text
    assert "are one setting; together, in the cells of both: 1.10 (" in text
    assert "| qa | 1.20 (1.20 to 1.20; 2 pairs) | 1.00 (1.00 to 1.00; 2 pairs) |" in text
    del cells[1050, "qa", "no-reuse-gating"]
    assert "one setting" not in markdown(results_of(cells), judge(results_of(cells), NO_AGREEMENT))


def test_methods_without_gating_must_keep_the_text() -> None:
    other = pairs_of(1.2, 1.2, text="other")
    assert verdict(results_of({(1050, "qa", "exact"): other}), "exact: texts of 2 that differ") is False
    assert verdict(results_of({(1050, "qa", "fast"): other}), "fast: texts of 2 that differ") is None
    assert verdict(results_of({(1050, "qa", "exact"): pairs_of(1.2)}), "exact: texts of 1") is True


def test_the_text_of_off_must_not_depend_on_the_limit() -> None:
    odd = Pair(0, pairs_of(1.0)[0].method, pairs_of(1.0, text="other")[0].method, method_first=False)
    what = "off: prompts of 1 whose text is not always the same"
    cells: Cells = {(1050, "qa", "fast"): pairs_of(1.2), (1500, "qa", "fast"): pairs_of(1.2)}
    assert verdict(results_of(cells), what) is True
    cells[1500, "qa", "fast"] = [odd]
    assert verdict(results_of(cells), what) is False


def test_a_component_is_judged_over_the_cells_that_both_have() -> None:
    cells: Cells = {
        (1050, "qa", "balanced"): pairs_of(1.5, 1.5),
        (1500, "qa", "balanced"): pairs_of(1.0, 1.0),
        (1050, "qa", "no-adaptive"): pairs_of(1.4, 1.4),
    }
    assert verdicts(results_of(cells))["balanced / no-adaptive: shown"] is True
    cells[1050, "qa", "no-adaptive"] = pairs_of(1.6, 1.6)
    assert verdicts(results_of(cells))["balanced / no-adaptive: missed"] is False


def test_a_component_whose_interval_reaches_1_is_not_shown() -> None:
    cells: Cells = {
        (1050, "qa", "balanced"): pairs_of(1.6, 1.2, 1.5, 1.3),
        (1050, "qa", "no-adaptive"): pairs_of(1.5, 1.1, 1.3, 1.4),
    }
    assert verdicts(results_of(cells))["balanced / no-adaptive: not shown"] is None
    cells = {(1050, "qa", name): pairs_of(ratio) for name, ratio in (("balanced", 1.6), ("no-adaptive", 1.1))}
    assert verdicts(results_of(cells))["balanced / no-adaptive: not shown"] is None, "a pair has no interval"


def test_cost_model_and_failed_cells_are_judged() -> None:
    results = results_of({(1050, "qa", "exact"): pairs_of(1.2)})
    results.fits["1050 MiB, shared"] = {"r2": 0.96, "mape": 0.06, "n": 256}
    results.errors[1500, "qa", "exact"] = "it ended\n  log"
    assert verdict(results, "1050 MiB, shared: R²") is True
    assert verdict(results, "1050 MiB, shared: MAPE") is False
    assert verdict(results, "1500 MiB, qa, exact") is False


# tables


def test_tables_have_a_row_for_each_workload_and_their_mean() -> None:
    cells: Cells = {
        (1050, "qa", "exact"): pairs_of(1.0, 1.0, mean_tokens_per_step=1.75, displaced_weight=0.04),
        (1050, "rag", "exact"): pairs_of(4.0, 4.0),
        (1050, "qa", "fast"): pairs_of(3.0),
    }
    results = results_of(cells)
    text = markdown(results, judge(results, NO_AGREEMENT))
    assert "| workload | exact | fast |" in text
    assert "| qa | 1.00 (1.00 to 1.00; 2 pairs) | 3.00 (1 pair) |" in text
    assert "| rag | 4.00 (4.00 to 4.00; 2 pairs) | – |" in text
    both = "2.00 (0.56 to 7.15; 4 pairs)"
    assert f"| all | {both} | 3.00 (1 pair) |" in text
    assert f"| exact | {both} | {both} | 1.00 (1.00 to 1.00; 2 pairs) (1050 MiB, qa) |" in text
    (figures,) = [line for line in text.splitlines() if line.startswith("| exact | ") and "1.75" in line]
    assert "4.0%" in figures
    assert "## Goals" in text


# quality files


def setting(share: float, n_rows: int | None = None, **options: Any) -> dict[str, Any]:
    rows = {"same_top1": share} if n_rows is None else {"same_top1": share, "n_rows": n_rows}
    return {"options": {"method": "s2moe", **options}, "rows": {"all": rows}}


def test_each_limit_has_its_agreement_and_no_file_hides_another(tmp_path: Path) -> None:
    paths = []
    for number, (limit_mib, share) in enumerate([(1050, 0.90), (1050, 0.95), (1500, 0.96)]):
        paths.append(tmp_path / f"{number}.json")
        memory = {"budget_bytes": limit_mib << 20}
        settings = [setting(share, 400, preset="balanced")]
        paths[-1].write_text(json.dumps({"memory": memory, "settings": settings}))
    found = read_agreement(paths)
    assert found.cells == {("balanced", 1050): Agreement(0.90, 400), ("balanced", 1500): Agreement(0.96, 400)}
    assert found.least("balanced") == (1050, Agreement(0.90, 400))
    assert found.least("fast") is None
    assert Agreement(0.90, 400).standard_error == pytest.approx(0.015)


def test_the_measured_files_of_the_documentation_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "docs" / "measurements"
    found = read_agreement([folder / "quality-1050MiB.json", folder / "quality-1500MiB.json"])
    assert set(found.limits("balanced")) == {1050, 1500}
    results = Results.load(folder / "speculation.json")
    assert "## Never slower" in markdown(results, judge(results, found))


def test_agreement_is_read_by_preset_and_by_budget(tmp_path: Path) -> None:
    settings = [
        setting(0.94, preset="balanced"),
        setting(0.97, preset="balanced", error_budget=0.02),
        setting(0.5, preset="balanced", draft_experts=1),
    ]
    path = tmp_path / "q.json"
    path.write_text(json.dumps({"settings": settings}))
    known = {("balanced", None): Agreement(0.94), ("budget-0.02", None): Agreement(0.97)}
    assert read_agreement([path]).cells == known
    path.write_text("[]")
    with pytest.raises(QualityFileError, match="is no JSON of `s2moe quality`"):
        read_agreement([path])
    with pytest.raises(QualityFileError, match="cannot read"):
        read_agreement([tmp_path / "missing"])


# cost model


def test_fit_is_perfect_without_errors_and_nothing_where_only_the_mean_is_known() -> None:
    times = [0.01 * (1 + number % 7) for number in range(100)]
    assert fit_of([(seconds, seconds) for seconds in times])["r2"] == pytest.approx(1)
    off = fit_of([(1.05 * seconds, seconds) for seconds in times])
    assert off["mape"] == pytest.approx(0.05)
    mean = sum(times) / len(times)
    assert fit_of([(mean, seconds) for seconds in times])["r2"] == pytest.approx(0)
    with pytest.raises(CostFitError, match="only 0 verifications were predicted"):
        fit_of([(0.0, seconds) for seconds in times])


# plots


def test_plots_are_drawn_where_there_is_data(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    speculation = {"acceptance_length": 2.0, "experts_touched": 9000}
    cells: Cells = {
        (limit, workload, method): pairs_of(1.1, 1.4, **speculation)
        for limit in (1050, None)
        for workload in ("qa", "rag")
        for method in ("exact", "balanced")
    }
    agreement = Agreements({("balanced", 1050): Agreement(0.94), ("exact", 1050): Agreement(1.0)})
    drawn = draw_all(results_of(cells), agreement, tmp_path)
    drawn.append(predictions({"1050 MiB": {"r2": 0.9, "mape": 0.1, "samples": [[0.1, 0.11]]}}, tmp_path))
    names = ["speed-up", "acceptance-cost", "speed-agreement", "predicted-measured"]
    assert [path.stem for path in drawn] == names
    assert all("<svg" in path.read_text() for path in drawn)
    single = results_of({(1050, "qa", "exact"): pairs_of(1.1)})
    assert draw_all(single, NO_AGREEMENT, tmp_path) == drawn[:1]
    elsewhere = Agreements({("exact", 2800): Agreement(1.0)})
    assert draw_all(single, elsewhere, tmp_path) == drawn[:1]


# the command


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "exakt"], "--methods: 'exakt' is not a method; choose from off, control"),
        (["--methods", "off"], "nothing to compare with off"),
        (["--workloads", "qa,poems"], "--workloads: 'poems' is none"),
        (["--limits", "many"], "write MiB or none"),
        (["--limits", "-5"], "a limit is above 0"),
        (["--prompts", "11"], "--prompts: 11 is not from 1 to 10"),
        (["--tokens", "1"], "--tokens: at least 2"),
        (["--report-only", "--json", "/nowhere.json"], "cannot read /nowhere.json"),
        (["--quality", "/nowhere.json"], "--quality: cannot read /nowhere.json"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def grid_for(*flags: str) -> Any:
    parser = command.create_parser()
    return command.create_grid(parser.parse_args(flags), parser)


def test_the_default_grid_and_the_full_one() -> None:
    grid = grid_for()
    assert [method.name for method in grid.methods] == ["exact", "balanced"]
    assert (grid.workloads, grid.limits, grid.n_prompts) == (
        ("qa", "code", "summarise"),
        (1050, 1500, 2100),
        4,
    )
    full = grid_for("--full")
    assert len(full.methods) == 11
    assert (len(full.workloads), len(full.limits), full.n_prompts) == (7, 5, 10)
    assert [method.name for method in grid_for("--full", "--methods", "fast").methods] == ["fast"]
    assert grid_for("--static-hot-list").methods[-1].name == "static"
    assert grid_for("--limits", "none").limits == (None,)


def test_budgets_are_methods() -> None:
    assert method_named("budget-0.07").options["error_budget"] == pytest.approx(0.07)
    for name in ("budget-1.5", "budget-", "budget-x"):
        with pytest.raises(MethodError):
            method_named(name)


def test_a_server_without_the_flag_is_no_server_for_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def help_text(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, stdout="--no-shared-context")

    monkeypatch.setattr(command.subprocess, "run", help_text)
    command.check_servers(grid_for("--methods", "expert-skip,exact"))
    with pytest.raises(SystemExit, match="static: not available: this server has no --expert-policy"):
        command.check_servers(grid_for("--static-hot-list"))


def test_the_static_server_gets_the_list_of_the_answers_that_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, ...]] = []

    def profile(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        options = dict(zip(argv[2::2], argv[3::2], strict=True))
        asked = [json.loads(prompt.messages_json) for prompt in read_prompts(Path(options["--prompts"]))]
        assert asked == [*prompts("qa")[:2], *prompts("code")[:2]]
        assert (argv[1], options["--model"], options["--max-tokens"]) == ("profile", "m.gguf", "64")
        Path(options["--out"]).write_text("{}")
        return subprocess.CompletedProcess(argv, 0, "", "")

    def serving(_model: Path, _work: Path, *flags: str, **_: Any) -> None:
        started.append(flags)

    monkeypatch.setattr(hot_list.subprocess, "run", profile)
    monkeypatch.setattr(command, "Serving", serving)
    path = hot_list.write_hot_list(
        Path("m.gguf"), tmp_path, workloads=("qa", "code"), n_prompts=2, n_tokens=64, say=lambda _: None
    )
    start = command.server_starter(Path("m.gguf"), tmp_path, 2, path)
    start(1050, "static")
    start(1050, "shared")
    assert " ".join(started[0]).endswith(
        f"--expert-policy static --hot-experts {path} --memory-budget {1050 << 20} --prompt-cache-size 0"
    )
    assert path.exists()
    assert "--hot-experts" not in started[1]


def test_the_static_condition_is_a_reference_without_goals() -> None:
    results = results_of({(1050, "qa", "static"): pairs_of(0.5)})
    results.fits = {f"1050 MiB, {kind}": {"n": 9, "r2": 0.1, "mape": 0.5} for kind in ("static", "shared")}
    lines = judge(results, NO_AGREEMENT)
    (ratio,) = [line for line in lines if "static hot list" in line.what]
    assert ratio.passed is None
    failed = [line.what for line in lines if line.passed is False]
    assert failed == ["1050 MiB, shared: R² of 9 verifications", "1050 MiB, shared: MAPE"]


def test_a_profile_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 1, "", "s2moe: error: no experts\n")

    monkeypatch.setattr(hot_list.subprocess, "run", fail)
    with pytest.raises(hot_list.HotListError, match="no experts"):
        hot_list.write_hot_list(
            Path("m.gguf"), tmp_path, workloads=("qa",), n_prompts=1, n_tokens=8, say=lambda _: None
        )


def test_an_earlier_run_is_moved_aside_or_continued(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    results_of({(1050, "qa", "exact"): pairs_of(1.2)}).save(out)
    facts = Results.load(out).facts
    said: list[str] = []
    assert command.open_results(out, facts, resume=True, say=said.append).cells
    assert not said
    assert not command.open_results(out, facts, resume=False, say=said.append).cells
    assert Results.load(tmp_path / "out.previous.json").cells
    assert "--resume would have continued it" in said[0]


@pytest.fixture
def fake_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeServer]:
    """In place of `s2moe serve` and of memory limits; those that were started."""
    started: list[FakeServer] = []

    def starter(*_: Any) -> Any:
        def start(limit: int | None, server: str) -> FakeServer:
            started.append(FakeServer({options_of("control"): 3.0, options_of("exact"): 2.0}))
            return started[-1]

        return start

    monkeypatch.setattr(command, "server_starter", starter)
    monkeypatch.setattr(command, "check_limits", lambda *_: None)
    monkeypatch.setattr(command, "describe", lambda *_: {"n_tokens": 64, "build": "b1"})
    monkeypatch.setattr(command, "BUILD", tmp_path / "work")
    return started


def test_a_run_says_what_it_does_and_prints_the_tables(
    fake_servers: list[FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    flags = ["--methods", "off,exact", "--workloads", "qa", "--limits", "1050,none", "--json", str(out)]
    flags += ["--model", "m.gguf", "--prompts", "2"]
    assert command.main(flags) == 0
    said = capsys.readouterr()
    assert "4 pairs of 64 tokens, about 1 min; written to" in said.err
    assert "1050 MiB, qa, exact: 1.50 (1.50 to 1.50; 2 pairs) × off; 2 pairs left" in said.err
    assert "| qa | 1.50 (1.50 to 1.50; 2 pairs) |" in said.out
    assert len(fake_servers) == 2
    assert command.main([*flags, "--resume"]) == 0
    assert len(fake_servers) == 2, "everything was measured"
    assert "0 pairs" in capsys.readouterr().err


def test_missed_goals_end_with_1_only_when_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    results_of({(1050, "qa", "exact"): pairs_of(0.5, 0.5)}).save(out)
    flags = ["--report-only", "--json", str(out), "--markdown", str(tmp_path / "docs" / "out.md")]
    assert command.main(flags) == 0
    assert "FAIL" in capsys.readouterr().out
    assert "FAIL" in (tmp_path / "docs" / "out.md").read_text()
    assert command.main([*flags, "--strict"]) == 1
