"""Models that cannot be drafted for, or only in part, say so and answer all the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from s2moe.engine.native import Library, NativeError, Sampler, Status
from s2moe.engine.native_speculation import Speculator, speculator_limits

from expert_models import EXPERT_MODELS
from llama_model import LlamaModel
from speculation_model import EXACT, GREEDY, SpeculationModel, assert_same, plain_answer
from stored_model import PROMPT, StoredModel
from undraftable_models import write_dense_model, write_hybrid_model

pytestmark = pytest.mark.usefixtures("batch_invariance")


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def undraftable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write: dict[str, Callable[[Path], Path]] = {"dense": write_dense_model, "hybrid": write_hybrid_model}
    return write[request.param](tmp_path_factory.mktemp("undraftable") / f"{request.param}.gguf")


@contextmanager
def opened(path: Path) -> Iterator[LlamaModel]:
    """In a context of one sequence."""
    if path.stem == "dense":
        with LlamaModel(path, n_ctx=256, n_threads=1) as model:
            yield model
    else:
        with StoredModel(path, io="buffered", n_ctx=256) as stored:
            yield stored


def test_limits_say_why_not(undraftable: Path) -> None:
    with opened(undraftable) as model:
        limits = speculator_limits(Library(), model._model)
    assert limits.method == "off"
    assert not limits.width
    assert ("experts" if undraftable.stem == "dense" else "recurrent") in limits.reason


def test_limits_of_a_model_that_is_not_loaded(undraftable: Path) -> None:
    """The memory plan asks before it loads."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.no_alloc = True
    parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    model = llama_cpp.llama_model_load_from_file(str(undraftable).encode(), parameters)
    assert model
    assert speculator_limits(Library(), model).method == "off"
    llama_cpp.llama_model_free(model)


@pytest.mark.parametrize("method", ["s2moe", "cascade", "expert-skip", None])
def test_drafting_is_refused(undraftable: Path, method: str | None) -> None:
    library = Library()
    with opened(undraftable) as model:
        speculator = Speculator(library, model._context)
        with pytest.raises(NativeError) as error:
            speculator.begin({} if method is None else {"method": method})
        assert error.value.status == Status.UNSUPPORTED
        assert error.value.message
        speculator.close()


def test_plain_decoding_works(undraftable: Path) -> None:
    library = Library()
    with opened(undraftable) as model:
        expected = greedy(library, model)
        speculator = Speculator(library, model._context)
        with pytest.raises(NativeError):
            speculator.begin({})
        speculator.begin({"method": "off"})
        sampler = prefilled_sampler(library, model)
        tokens = [PROMPT[-1]]
        for i in range(16):
            step = speculator.step(sampler, tokens[-1], len(PROMPT) - 1 + i, 8)
            assert len(step) == 1
            tokens += step
        report = speculator.report()
        speculator.close()
        sampler.close()
    assert tokens[1:] == expected
    assert report["method"] == "off"
    assert (report["n_steps"], report["n_tokens"], report["n_drafted"]) == (16, 16, 0)
    # durations are of the evaluations alone, as where drafts are possible
    assert report["step_durations"]["plain"]["seconds"] == pytest.approx(report["verify_seconds"])
    assert report["verify_seconds"] > 0
    assert report["sample_seconds"] > 0


def prefilled_sampler(library: Library, model: LlamaModel) -> Sampler:
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(model._context), True)
    library.decode(model._context, PROMPT[:-1], 0)
    return Sampler(library, model._model, GREEDY)


def greedy(library: Library, model: LlamaModel) -> list[int]:
    sampler = prefilled_sampler(library, model)
    tokens = [PROMPT[-1]]
    for i in range(16):
        library.decode(model._context, [tokens[-1]], len(PROMPT) - 1 + i)
        tokens.append(sampler.sample(model._context))
    sampler.close()
    return tokens[1:]


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_limits_of_models_with_experts(name: str, expert_model: Callable[[str], Path]) -> None:
    with StoredModel(expert_model(name)) as model:
        limits = speculator_limits(model.library, model._model)
    assert limits.method == "s2moe"
    assert limits.width or limits.reason


def test_a_context_of_one_sequence_drafts_chains(expert_model: Callable[[str], Path]) -> None:
    with StoredModel(expert_model("q4_0")) as model:
        expected = greedy(model.library, model)
        model.clear()
        sampler = prefilled_sampler(model.library, model)
        speculator = Speculator(model.library, model.context)
        speculator.begin(EXACT)
        tokens = [PROMPT[-1]]
        while len(tokens) <= 16:
            tokens += speculator.step(sampler, tokens[-1], len(PROMPT) - 2 + len(tokens), 17 - len(tokens))
        report = speculator.report()
        speculator.close()
        sampler.close()
    assert tokens[1:] == expected
    assert report["n_admitted"] > 0
    assert report["admitted_by_depth"][0] == report["n_iterations"]  # no siblings


@pytest.mark.parametrize("options", [{"method": "expert-skip"}, {"shared_context": False}], ids=str)
def test_drafts_of_their_own_need_a_context(
    options: dict[str, Any], expert_model: Callable[[str], Path]
) -> None:
    with SpeculationModel(expert_model("q4_0")) as model:
        with pytest.raises(NativeError) as error:
            model.speculator.begin(options)
        assert error.value.status == Status.UNSUPPORTED
        assert_same(model.answer(PROMPT, 8, EXACT), plain_answer(model, PROMPT, 8))


def test_drafts_end_when_their_own_context_is_full(expert_model: Callable[[str], Path]) -> None:
    """A failure inside drafting: the answer goes on without, and says so."""
    prompt = [40 + (7 * i) % 200 for i in range(230)]
    with SpeculationModel(expert_model("q4_0"), n_ctx=512, draft_n_ctx=256) as model:
        expected = plain_answer(model, prompt, 60)
        answer = model.answer(prompt, 60, {"method": "expert-skip"})
        assert_same(answer, expected)
        assert answer.report["n_admitted"] > 0
        assert answer.report["disabled_reason"] in ("error", "context_full")
        assert answer.steps[-20:] == [1] * 20
        again = model.answer(PROMPT, 8, {"method": "expert-skip"})
        assert again.report["n_admitted"] > 0, "a later answer drafts again"
        assert again.report["disabled_reason"] == ""


def test_what_was_learnt_is_kept(expert_model: Callable[[str], Path]) -> None:
    path = expert_model("q4_0")
    with SpeculationModel(path) as model:
        model.speculator.begin({})
        assert model.speculator.report()["costs"]["single_seconds"] == 0
        learnt = model.answer(PROMPT, 64, EXACT).report["costs"]
        state = model.speculator.state()
    with SpeculationModel(path, state=state) as model:
        model.speculator.begin(EXACT)  # what was learnt belongs to a preset
        kept = model.speculator.report()["costs"]
        assert kept["single_seconds"] == pytest.approx(learnt["single_seconds"]) != 0
        for key in ("intercept_seconds", "row_seconds", "hit_seconds", "miss_seconds"):
            assert kept["verify"][key] == pytest.approx(learnt["verify"][key])
        assert json.loads(model.speculator.state()) == json.loads(state)
    for damaged in (b"", b"{", b"[]", b'{"version": 0}', state[: len(state) // 2], state.replace(b":", b";")):
        with SpeculationModel(path, state=damaged) as model:
            assert_same(model.answer(PROMPT, 8, EXACT), plain_answer(model, PROMPT, 8))
