"""The comparison of greedy answers, on made-up answers and on a random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from s2moe.bench import exactness
from s2moe.bench.exactness import Answer, Totals, compare, main, parse, questions, table
from s2moe.engine.messages import Configure, Speculation
from s2moe.engine.model import Model

from gguf_factory import write_random_model
from paying_drafts import with_paying_drafts


def answer(tokens: list[int], leads: list[float], *, salt: bytes = b"") -> Answer:
    return Answer(tokens, [bytes([token]) + salt for token in tokens], leads)


def test_equal_answers_are_exact() -> None:
    totals = Totals()
    totals.add("a", answer([1, 2, 3], [1.0, 1e-5, 1.0]), answer([1, 2, 3], [1.0, 1e-5, 1.0]), 1e-3)
    assert totals.is_exact
    assert (totals.n_prompts, totals.n_tokens, totals.n_near_ties) == (1, 3, 1)
    assert totals.differences == []


def test_other_bits_of_the_same_text_are_counted() -> None:
    totals = Totals()
    totals.add("a", answer([1, 2, 3], [1.0] * 3), answer([1, 2, 3], [1.0] * 3, salt=b"x"), 1e-3)
    assert not totals.is_exact
    assert (totals.n_rows_of_other_bits, totals.n_other_texts) == (3, 0)
    assert "3 rows" in totals.differences[0]


@pytest.mark.parametrize(("lead", "n_near_ties"), [(1e-4, 1), (0.5, 0)])
def test_another_text_counts_up_to_where_it_parts(lead: float, n_near_ties: int) -> None:
    totals = Totals()
    plain, ours = answer([1, 2, 3, 4], [1.0, lead, 1.0, 1.0]), answer([1, 9, 7, 8], [1.0] * 4)
    totals.add("a", plain, ours, 1e-3)
    assert not totals.is_exact
    assert (totals.n_other_texts, totals.n_other_texts_at_near_ties) == (1, n_near_ties)
    assert totals.n_rows_compared == 2, "behind another token everything is another"
    assert totals.n_rows_of_other_bits == 1
    assert "token 1 differs" in totals.differences[0]


def test_questions_differ() -> None:
    assert len(set(questions(200))) == 200
    assert len(questions(3)) == 3


def comparison(path: Path, n_prompts: int, *flags: str, keep: bool = False) -> Totals:
    model = Model(
        Configure(
            model_path=str(path),
            n_ctx=512,
            n_threads=1,
            keep_expert_counts=keep,
            speculation=Speculation(method="s2moe"),
        ),
        lambda _phase, _fraction: None,
    )
    try:
        return compare(model, parse(["--prompts", str(n_prompts), "--tokens", "24", *flags]))
    finally:
        model.close()


def test_forced_drafts_of_a_random_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random_model(path, "qwen3moe")
    totals = comparison(path, 2, "--forced")
    assert totals.is_exact, totals.differences
    assert totals.n_prompts == 2
    assert totals.n_iterations > 0.9 * totals.n_steps > 0
    assert f"| tokens | {totals.n_tokens} |" in table(totals, 1e-3)


def test_adaptive_drafts_of_a_random_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are known from an earlier run to pay."""
    monkeypatch.setenv("S2MOE_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    write_random_model(path, "qwen3moe")
    comparison(path, 1, keep=True)
    (kept,) = (tmp_path / "cache" / "speculation").iterdir()
    content = json.loads(kept.read_text())
    content["state"] = json.loads(with_paying_drafts(json.dumps(content["state"]).encode()))
    kept.write_text(json.dumps(content))
    totals = comparison(path, 2, keep=True)
    assert totals.is_exact, totals.differences
    assert totals.n_iterations > totals.n_tokens / 8
    assert totals.n_admitted > totals.n_iterations
    assert totals.n_accepted > 0


def test_models_are_compared_one_after_the_other_and_written_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, out = [tmp_path / "a.gguf", tmp_path / "b.gguf"], tmp_path / "out.json"
    for path in paths:
        write_random_model(path, "qwen3moe")
    flags = ["--model", *map(str, paths), "--prompts", "1", "--tokens", "12", "--threads", "1"]
    assert main([*flags, "--forced", "--json", str(out)]) == 0
    results = json.loads(out.read_text())
    assert [each["model"] for each in results] == ["a.gguf", "b.gguf"]
    for each in results:
        assert each["is_exact"]
        assert 0 < each["n_iterations"] <= each["n_steps"]
        assert each["n_rows_compared"] == each["n_tokens"] > 0
    assert "b.gguf\n\n| | |" in capsys.readouterr().out
    assert main([*flags, "--json", str(tmp_path)]) == 1
    assert "is a directory" in capsys.readouterr().err


def test_a_forced_run_without_drafts_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing differs then, but nothing was verified either."""
    path = tmp_path / "m.gguf"
    write_random_model(path, "qwen3moe")
    flags = ["--model", str(path), "--prompts", "1", "--tokens", "12", "--threads", "1"]
    monkeypatch.setattr(exactness, "compare", lambda *_: Totals(n_prompts=1, n_tokens=12, n_steps=12))
    assert main([*flags, "--forced"]) == 1
    assert "m.gguf: --forced, but none of 12 steps had a draft" in capsys.readouterr().err
    assert main(flags) == 0
