"""The premise of self-drafting: the arithmetic, and the drafts of a small random model."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from s2moe.bench.plotting import PlottingError
from s2moe.bench.premise.__main__ import main, numbers_of, parse_arguments
from s2moe.bench.premise.drafting import (
    ALL_EXPERTS,
    N_STEPS,
    Evaluator,
    Recorded,
    Text,
    draft_along,
    record,
)
from s2moe.bench.premise.figures import DraftFigures, RoutingCounts, StepFigures
from s2moe.bench.premise.plots import draw
from s2moe.bench.premise.report import Premise
from s2moe.bench.premise.speeds import OFF, Answered, Cell, cells_of, measure_speeds
from s2moe.engine.divergence import Rows
from s2moe.engine.messages import Configure, Speculation
from s2moe.engine.model import Model

from gguf_factory import write_random_model
from undraftable_models import write_dense_model, write_hybrid_model

ALL_DEPTHS = slice(None)
TEXT = Path(__file__).parents[1] / "data" / "chat-eval.txt"


# arithmetic


def test_precision_and_recall_count_the_best_of_a_prediction() -> None:
    counts = RoutingCounts(n_layer=3, n_depth=2, k=2)
    nothing = [[-1, -1], [-1, -1]]
    # two layers with experts and one without; two depths each
    counts.add(
        np.array([[[0, 1], [2, 3]], nothing, [[5, 4], [0, 1]]], dtype=np.int32),
        np.array([[[1, 7], [3, 2]], nothing, [[4, 5], [6, 0]]], dtype=np.int32),
    )
    assert counts.layers == [0, 2]
    assert counts.precision(2, by_layer=True, depths=ALL_DEPTHS).tolist() == [3 / 4, 3 / 4]
    assert counts.precision(2, by_layer=False, depths=ALL_DEPTHS).tolist() == [3 / 4, 3 / 4]
    assert counts.precision(1, by_layer=False, depths=ALL_DEPTHS).tolist() == [1 / 2, 1]
    assert counts.recall(1, by_layer=False, depths=ALL_DEPTHS).tolist() == [1 / 4, 1 / 2]
    assert counts.precision(2, by_layer=True, depths=slice(1, 2)).tolist() == [1, 1 / 2]


def test_parents_predict_the_token_behind_them() -> None:
    figure = DraftFigures.create(1, n_layer=1, n_depth=3, k=2)
    figure.add_routing(
        np.array([[[0, 1], [2, 3], [4, 5]]], dtype=np.int32),
        np.array([[[0, 1], [1, 0], [9, 2]]], dtype=np.int32),
    )
    assert figure.own.precision(2, by_layer=False, depths=ALL_DEPTHS).tolist() == [1, 0, 0]
    by_depth = figure.parent.precision(2, by_layer=False, depths=ALL_DEPTHS).tolist()
    assert math.isnan(by_depth[0])
    assert by_depth[1:] == [1, 1 / 2]
    assert figure.parent.recall(2, by_layer=True, depths=ALL_DEPTHS).tolist() == [3 / 4]


def test_lengths_end_at_the_first_mismatch() -> None:
    steps = StepFigures()
    for is_match, overlap in (([True, False, True], [0.5, 0.5, 0.5]), ([True, True, False], [1, 0.25, 0])):
        none = np.zeros(3)
        steps.add(
            Rows(
                kl=np.array([1.0, 2.0, 3.0]),
                delta_p=none,
                overlap=np.array(overlap),
                same_top1=np.array(is_match),
                reference_loss=none,
                other_loss=none,
            )
        )
    assert steps.greedy_acceptance.tolist() == [1, 0.5, 0.5]
    assert steps.greedy_length == 1.5
    assert steps.sampled_acceptance.tolist() == [0.75, 0.375, 0.25]
    assert steps.sampled_length == ((0.5 + 0.25 + 0.125) + (1 + 0.25)) / 2
    assert steps.mean_kl.tolist() == [1, 2, 3]


def test_starts_leave_room_for_the_token_behind_the_last_step() -> None:
    def starts(n_tokens: int, stride: int) -> list[int]:
        empty = np.empty((0, 0), np.float32), np.empty((0, 0, 0), np.int32)
        return Recorded([1], [0] * n_tokens, *empty).starts(stride)

    assert starts(N_STEPS, 1) == []
    assert starts(N_STEPS + 1, 1) == [0]
    assert starts(N_STEPS + 9, 4) == [8, 4, 0]


def answered(
    n_tokens: int, seconds: float, *, accepted: int = 0, iterations: int = 0, steps: int = 1
) -> Answered:
    report = {"n_accepted": accepted, "n_iterations": iterations, "n_steps": steps, "n_tokens": n_tokens}
    return Answered(n_tokens, seconds, report)


def test_pairs_alternate_and_ratios_are_of_seconds_per_token() -> None:
    asked: list[tuple[list[int], Mapping[str, Any]]] = []

    def answer(prompt: list[int], options: Mapping[str, Any], n_tokens: int) -> Answered:
        asked.append((prompt, options))
        assert n_tokens == 10
        if options == OFF:
            return answered(10, 2.0)
        # a short answer is compared by its tokens
        return answered(5, 0.5, accepted=3, iterations=2, steps=2)

    cells = cells_of([2], [8], "fast")
    pairs: list[Cell] = []
    measure_speeds(answer, [[1], [2]], cells, 10, pairs.append)
    draft = {"method": "s2moe", "preset": "fast", "draft_experts": 2}
    cap = {"method": "s2moe", "preset": "fast", "reuse_cap": 8}
    assert asked == [
        *(([2], draft), ([1], OFF), ([2], draft), ([1], draft), ([2], OFF)),
        *(([2], cap), ([1], OFF), ([2], cap), ([1], cap), ([2], OFF)),
    ]
    assert pairs == [cells[0], cells[0], cells[1], cells[1]]
    assert cells[0].ratios == [2.0, 2.0]
    assert cells[0].acceptance_length == 2.5
    assert cells[0].mean_tokens_per_step == 2.5


@pytest.mark.parametrize("n_prompts", [2, 3, 4, 5])
def test_no_pair_is_of_an_answer_behind_one_to_its_own_prompt(n_prompts: int) -> None:
    asked: list[int] = []

    def answer(prompt: list[int], _options: Mapping[str, Any], _n_tokens: int) -> Answered:
        # what finds its experts in memory is fast
        is_warm = asked[-1:] == prompt
        asked.append(prompt[0])
        return answered(10, 1.0 if is_warm else 2.0)

    cells = cells_of([1, 2], [8], "fast")
    prompts = [[number] for number in range(n_prompts)]
    measure_speeds(answer, prompts, cells, 10, lambda _: None)
    assert [cell.tokens_per_second for cell in cells] == [[5.0] * n_prompts] * 3
    assert [cell.ratios for cell in cells] == [[1.0] * n_prompts] * 3


def test_one_prompt_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    write_random_model(path, "qwen3moe")
    flags = ["--model", str(path), "--sections", "speed", "--workloads", "qa", "--prompts", "1"]
    assert main(flags) == 1
    assert "`speed` needs two prompts" in capsys.readouterr().err


def test_an_empty_answer_gives_no_pair() -> None:
    cells = cells_of([1], [], "exact")
    measure_speeds(lambda *_: answered(0, 0.0), [[1], [2]], cells, 4, lambda _: None)
    assert cells[0].ratios == []
    assert cells[0].speed is None
    assert cells[0].acceptance_length is None


# a random model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """32 experts, 8 used, 3 layers."""
    path = tmp_path_factory.mktemp("premise") / "olmoe.gguf"
    write_random_model(path, "olmoe")
    configure = Configure(
        model_path=str(path), n_ctx=256, keep_expert_counts=False, speculation=Speculation(method="off")
    )
    loaded = Model(configure, lambda _phase, _fraction: None)
    yield loaded
    loaded.close()


@pytest.fixture
def evaluator(model: Model) -> Iterator[Evaluator]:
    evaluator = Evaluator(model)
    yield evaluator
    evaluator.close()


def tokens_of(model: Model, n_tokens: int) -> list[int]:
    return np.random.default_rng(5).integers(3, model.info.n_vocab, n_tokens).tolist()


def figures_of(model: Model, *numbers: int) -> list[DraftFigures]:
    return [
        DraftFigures.create(number, n_layer=model.info.n_layer, n_depth=N_STEPS, k=model.info.n_expert_used)
        for number in numbers
    ]


def test_a_draft_with_all_experts_is_the_target(model: Model, evaluator: Evaluator) -> None:
    tokens = tokens_of(model, 30)
    recorded = record(evaluator, Text(tokens[:10], tokens[10:]), 100)
    assert recorded.tokens == tokens[10:]
    assert recorded.ids.shape == (3, 20, 8)
    (figure,) = figures_of(model, 8)
    assert draft_along(evaluator, recorded, [figure], stride=3) == 4
    for steps in (figure.shared, figure.independent):
        assert steps.mean_kl == pytest.approx(np.zeros(N_STEPS), abs=1e-5)
        assert steps.greedy_length == N_STEPS
        assert steps.sampled_length == pytest.approx(N_STEPS, abs=0.05)
    assert figure.own.precision(8, by_layer=True, depths=ALL_DEPTHS) == pytest.approx(np.ones(3), abs=0.02)


def test_drafts_read_the_kv_cache_that_they_should(model: Model, evaluator: Evaluator) -> None:
    tokens = tokens_of(model, 30)
    prompt, rest = tokens[:10], tokens[10:]
    recorded = record(evaluator, Text(prompt, rest), 100)
    (figure,) = figures_of(model, 1)
    draft_along(evaluator, recorded, [figure], stride=6)
    starts = recorded.starts(6)
    assert starts == [6, 0]
    for number, start in enumerate(starts):
        before = prompt + rest[:start]
        found = {}
        for name, n_experts in (("shared", ALL_EXPERTS), ("independent", 1)):
            evaluator.prefill(before, n_experts)
            logits, _ = evaluator.evaluate(rest[start : start + 1], len(before), 1)
            found[name] = Rows.compare(recorded.logits[[start]], logits, [rest[start + 1]]).kl[0]
        assert found["shared"] > 1e-3
        assert found["independent"] != pytest.approx(found["shared"], rel=1e-2)
        assert figure.shared.kl[number][0] == pytest.approx(found["shared"], rel=1e-3)
        assert figure.independent.kl[number][0] == pytest.approx(found["independent"], rel=1e-3)
    # the root on the target's KV, then drafts on their own
    assert 0 < figure.own.precision(8, by_layer=False, depths=slice(1, 7)).max() < 1


def test_greedy_texts_are_what_the_target_finds_most_probable(model: Model, evaluator: Evaluator) -> None:
    prompt = tokens_of(model, 10)
    recorded = record(evaluator, Text(prompt), 12)
    assert 0 < len(recorded.tokens) <= 12
    assert recorded.logits.argmax(axis=-1)[:-1].tolist() == recorded.tokens[1:]
    before = recorded.prompt + recorded.tokens[:-1]
    evaluator.prefill(before, ALL_EXPERTS)
    again, _ = evaluator.evaluate(recorded.tokens[-1:], len(before), ALL_EXPERTS)
    assert again[0] == pytest.approx(recorded.logits[-1], abs=1e-3)


def test_a_dense_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_dense_model(tmp_path / "dense.gguf")
    assert main(["--model", str(path), "--sections", "drafts", "--text", str(TEXT)]) == 1
    assert "premise: error: the model has no experts" in capsys.readouterr().err


# command and report


def test_drafts_along_a_file_give_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, tables = tmp_path / "m.gguf", tmp_path / "out.json", tmp_path / "out.md"
    write_random_model(path, "deepseek2-lite")
    arguments = ["--model", path, "--sections", "drafts", "--text", TEXT, "--workloads", "qa", "--prompts", 1]
    arguments += [
        "--tokens",
        24,
        "--stride",
        8,
        "--draft-experts",
        "1,6",
        "--json",
        out,
        "--markdown",
        tables,
    ]
    assert main([str(each) for each in arguments]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == tables.read_text().strip()
    assert "### KL(target ‖ draft) by decode step" in captured.out
    found = json.loads(out.read_text())
    assert (found["format"], found["n_texts"], found["n_starts"]) == ("s2moe-premise", 1, 2)
    sparse, whole = found["drafts"]
    # the first layer is dense
    assert sparse["layers"] == whole["layers"] == [1, 2]
    assert whole["routing"]["own"]["precision_by_depth"] == pytest.approx([1] * N_STEPS, abs=0.05)
    assert whole["routing"]["parent"]["precision_by_depth"][0] is None
    assert sparse["shared"]["mean_kl"][0] > whole["shared"]["mean_kl"][0]
    assert found["speed"] == []


def test_speeds_of_a_random_model_are_pairs_of_each_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "out.json"
    write_random_model(path, "qwen3moe")
    flags = ["--model", str(path), "--sections", "speed", "--workloads", "translate", "--tokens", "12"]
    assert main([*flags, "--draft-experts", "1", "--caps", "8", "--json", str(out)]) == 0
    assert "### Speed against plain decoding" in capsys.readouterr().out
    cells = json.loads(out.read_text())["speed"]
    assert [(cell["axis"], cell["value"], len(cell["ratios"])) for cell in cells] == [
        ("draft_experts", 1, 2),
        ("reuse_cap", 8, 2),
    ]


def test_numbers_that_no_model_can_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    write_random_model(path, "llama")
    arguments = ["--model", str(path), "--sections", "drafts", "--draft-experts", "3", "--text", str(TEXT)]
    assert main(arguments) == 1
    assert "--draft-experts: each is at most the model's k, 2" in capsys.readouterr().err
    assert main(["--model", str(path), "--text", str(tmp_path / "none")]) == 1
    assert "none cannot be read" in capsys.readouterr().err
    assert main(["--json", str(tmp_path)]) == 1
    assert "is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--sections", "all"], ["--workloads", "qa,x"], ["--caps", "8,0"], ["--tokens", "8"], ["--stride", "0"]],
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(arguments)
    assert stopped.value.code == 2
    assert "premise: error: " in capsys.readouterr().err


def test_lists_of_numbers() -> None:
    assert numbers_of("1,12") == (1, 12)


def measured() -> Premise:
    figure = DraftFigures.create(2, n_layer=2, n_depth=N_STEPS, k=4)
    generator = np.random.default_rng(3)
    ids = generator.integers(0, 9, (2, N_STEPS, 4)).astype(np.int32)
    figure.add_routing(ids, ids)
    logits = generator.normal(size=(2, N_STEPS, 11)).astype(np.float32)
    for steps in (figure.shared, figure.independent):
        steps.add(Rows.compare(logits[0], logits[1], [0] * N_STEPS))
    cells = cells_of([2], [8, 12], "fast")
    for cell in cells[:2]:
        cell.add(answered(4, 1.0, accepted=3, iterations=2, steps=2), answered(4, 1.5))
    model = {"name": "Fake", "n_expert": 9, "n_expert_used": 4, "n_layer": 2}
    return Premise(model=model, build="b1", figures=[figure], n_texts=1, n_starts=1, cells=cells)


def test_report_has_each_table_and_is_json() -> None:
    premise = measured()
    text = premise.markdown()
    assert text.count("\n### ") == 5
    assert "| 2   | the token, best 4: precision = recall  | 100.0 % |" in text
    assert "| reuse cap     | 8     | 1.50 (1 pair) × |              2.50 |            2.00 |  4.00 |" in text
    assert "| reuse cap     | 12    |               – |                 – |               – |     – |" in text
    assert json.loads(json.dumps(premise.to_json(), allow_nan=False)) == premise.to_json()


def test_plots_are_drawn_or_refused_with_the_remedy(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(PlottingError, match=r"\[bench\]"):
            draw(measured(), tmp_path)
        return
    names = sorted(path.name for path in draw(measured(), tmp_path))
    assert names == [f"premise-{name}.svg" for name in ("acceptance", "divergence", "routing", "speed")]


def test_a_recurrent_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_hybrid_model(tmp_path / "hybrid.gguf")
    assert main(["--model", str(path), "--sections", "drafts", "--text", str(TEXT)]) == 1
    assert "recurrent state" in capsys.readouterr().err
