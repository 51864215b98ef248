"""One answer of plain decodes and of steps with several tokens, on a model without a library."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from answerer import PROMPT, Answerer, request
from fake_model import FakeModel, FakeSampler, FakeSpeculator

from s2moe.engine.constraint import Constraint
from s2moe.engine.decoder import PlainDecoder, SpeculativeDecoder, create_decoder
from s2moe.engine.errors import RequestAbortedError, RequestError
from s2moe.engine.messages import Finished, Sampling, Speculation, Step
from s2moe.engine.native import NativeError, Status

OFF = Speculation(method="off")


def kv_text(model: FakeModel) -> str:
    return "".join(map(chr, model.kv_tokens))


def text_of(steps: list[Step]) -> str:
    return "".join(step.content for step in steps)


@pytest.fixture
def speculator() -> FakeSpeculator:
    return FakeSpeculator(width=3)


@pytest.fixture
def model(speculator: FakeSpeculator) -> FakeModel:
    return FakeModel(speculator)


# ── answers ─────────────────────────────────────────────────────────────────────────────────────


def test_each_token_of_a_step_is_an_event_of_its_own(
    model: FakeModel, speculator: FakeSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, finished = Answerer(model, monkeypatch, "abcdefgh.").answer()
    assert [step.content for step in steps if step.content] == list("abcdefgh")
    assert sum(step.n_tokens for step in steps) == finished.n_completion_tokens == 9
    assert (finished.reason, finished.timings.n_decode_steps) == ("stop", 3)
    # the first token is the prompt's; then bcd, efg and h. come together, and with them their time
    together = [[step.sampled_ns for step in steps[i:j]] for i, j in ((1, 4), (4, 7), (7, 9))]
    assert all(len(set(times)) == 1 for times in together)
    assert len({step.sampled_ns for step in steps}) == 4
    assert kv_text(model) == PROMPT + "abcdefgh"
    assert [position for _, position, _ in speculator.steps] == [3, 6, 9]
    assert finished.timings.speculation is not None
    assert finished.timings.speculation.n_steps == 3


def test_steps_give_the_text_that_plain_decodes_give(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (1, 2, 5, 8):
        model = FakeModel(FakeSpeculator(width))
        drafted, with_drafts = Answerer(model, monkeypatch, "a long text.").answer()
        plain, without = Answerer(model, monkeypatch, "a long text.").answer(speculation=OFF)
        assert [step.content for step in drafted] == [step.content for step in plain]
        assert with_drafts.n_completion_tokens == without.n_completion_tokens


@pytest.mark.parametrize("n", range(1, 8))
def test_max_tokens_is_exact_and_passed_on(
    model: FakeModel, speculator: FakeSpeculator, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    steps, finished = Answerer(model, monkeypatch, "abcdefgh.").answer(max_tokens=n)
    assert text_of(steps) == "abcdefgh"[:n]
    assert (finished.reason, finished.n_completion_tokens) == ("length", n)
    assert [n_max for _, _, n_max in speculator.steps] == list(range(n - 1, 0, -3))


def test_context_limit_is_passed_on(
    model: FakeModel, speculator: FakeSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, finished = Answerer(model, monkeypatch, "x" * 100).answer()
    assert (finished.reason, finished.n_completion_tokens) == ("length", model.n_ctx - len(PROMPT))
    assert len(model.kv_tokens) == model.n_ctx - 1
    _, position, n_max = speculator.steps[-1]
    assert position + n_max == model.n_ctx - 1


@pytest.mark.parametrize(
    ("stop", "kept", "in_cache"),
    [("b", "a", "abc"), ("bc", "a", "abc"), ("d", "abc", "abc"), ("e", "abcd", "abcdef")],
)
def test_stop_string_within_a_step_ends_the_answer_there_and_the_cache_holds_what_it_holds(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, stop: str, kept: str, in_cache: str
) -> None:
    steps, finished = Answerer(model, monkeypatch, "abcdefgh.").answer(stop=[stop])
    assert text_of(steps) == kept
    assert (finished.reason, finished.stop_string) == ("stop", stop)
    assert finished.n_completion_tokens == len(kept) + len(stop)
    assert kv_text(model) == PROMPT + in_cache


def test_abort_takes_effect_between_steps(
    model: FakeModel, speculator: FakeSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation_ = Answerer(model, monkeypatch, "abcdefgh.").start()
    events = []
    for event in generation_.run():
        events.append(event)
        if isinstance(event, Step) and event.content == "c":
            model.abort.requested = True
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.n_completion_tokens) == ("cancelled", 4)
    assert kv_text(model) == PROMPT + "abc"
    assert finished.timings.speculation is not None
    assert finished.timings.speculation.n_steps == 1
    assert finished.timings.n_decode_steps == 1


def test_off_is_plain_decoding_without_a_report(
    model: FakeModel, speculator: FakeSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, finished = Answerer(model, monkeypatch, "abc.").answer(speculation=OFF)
    assert text_of(steps) == "abc"
    assert speculator.begun == speculator.steps == []
    assert finished.timings.speculation is None
    assert finished.timings.n_decode_steps == 3
    assert kv_text(model) == PROMPT + "abc"


def test_undraftable_model_decodes_plainly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(is_possible=False)
    _, finished = Answerer(model, monkeypatch, "abc.").answer(speculation=Speculation(method="cascade"))
    report = finished.timings.speculation
    assert report is not None
    assert (report.method, report.disabled_reason, report.n_steps) == ("off", "unsupported", 3)


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


def create(model: FakeModel, sampler: FakeSampler | None = None, **options: Any) -> Any:
    fake: Any = model
    chosen: Any = sampler or FakeSampler("abcdefgh.")
    asked = request(**options)
    return create_decoder(fake, asked, chosen, Constraint.of_request(asked.sampling))


def test_options_reach_the_speculator_and_are_checked_before_the_prompt(
    model: FakeModel, speculator: FakeSpeculator
) -> None:
    decoder = create(model, speculation=Speculation(preset="exact", max_nodes=2))
    expected = {"method": "s2moe", "preset": "exact", "max_nodes": 2}
    assert speculator.begun == [expected]
    assert model.n_decodes == 0
    decoder.next_tokens(5)
    decoder.next_tokens(4)
    # once more behind the prompt, where the response's counters start
    assert speculator.begun == [expected] * 2


def test_drafts_of_their_own_context_are_told_the_prompt(
    speculator: FakeSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Speculation(method="expert-skip")
    model = FakeModel(speculator, own)
    Answerer(model, monkeypatch, "abc.").answer()
    Answerer(model, monkeypatch, "abc.").answer(speculation=Speculation(method="s2moe"))
    assert speculator.fed == [[ord(letter) for letter in PROMPT]]


def test_bad_option_is_the_requests_error(model: FakeModel, speculator: FakeSpeculator) -> None:
    speculator.begin_failure = NativeError(Status.INVALID, "draft_experts must be between 0 and 2")
    with pytest.raises(RequestError) as caught:
        create(model, speculation=Speculation(draft_experts=9))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "s2moe.draft_experts")


def test_unsupported_at_begin_is_no_error(model: FakeModel, speculator: FakeSpeculator) -> None:
    speculator.begin_failure = NativeError(Status.UNSUPPORTED, "cannot be drafted for")
    decoder = create(model)
    assert isinstance(decoder, PlainDecoder)
    report = decoder.report()
    assert report is not None
    assert report.disabled_reason == "unsupported"


def test_request_for_another_server_is_refused(speculator: FakeSpeculator) -> None:
    with pytest.raises(RequestError, match="--speculation off"):
        create(FakeModel(None, OFF, is_possible=False), speculation=Speculation(method="s2moe"))
    with pytest.raises(RequestError, match="--no-shared-context"):
        create(FakeModel(speculator), speculation=Speculation(shared_context=False))


class FailingModel(FakeModel):
    """Its steps fail as Model's do."""

    code = "internal"

    def speculate(self, *_arguments: object, **_options: object) -> list[int]:
        raise RequestError(self.code, "decode failed: on purpose")


def test_step_that_fails_at_a_grammar_is_one_plain_token(speculator: FakeSpeculator) -> None:
    model = FailingModel(speculator)
    decoder = create(model, sampling=Sampling(grammar='root ::= "abcd"'))
    assert isinstance(decoder, SpeculativeDecoder)
    tokens = [decoder.next_tokens(5) for _ in range(4)]
    assert tokens == [[ord(letter)] for letter in "abcd"]
    assert kv_text(model) == "abc"
    assert decoder.n_steps == 3


def test_step_without_a_plain_way_out_gives_the_plain_error(speculator: FakeSpeculator) -> None:
    model, sampler = FailingModel(speculator), FakeSampler("ab")
    decoder = create(model, sampler, sampling=Sampling(grammar='root ::= "a"'))
    decoder.next_tokens(5)
    sampler.failure = NativeError(Status.INTERNAL, "no candidates")
    with pytest.raises(RequestError) as caught:
        decoder.next_tokens(4)
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "grammar")


def test_schema_without_a_further_token_is_the_schemas_error(model: FakeModel) -> None:
    fake, sampler = model, FakeSampler("a")
    constraint = Constraint({"grammar": "root ::= x"}, "invalid_schema", "response_format")
    decoder = create_decoder(fake, request(), sampler, constraint)  # type: ignore[arg-type]
    sampler.failure = NativeError(Status.INTERNAL, "no candidates")
    with pytest.raises(RequestError, match="allows no further token") as caught:
        decoder.next_tokens(4)
    assert (caught.value.code, caught.value.param) == ("invalid_schema", "response_format")


def test_grammar_that_becomes_too_ambiguous_says_only_that(model: FakeModel) -> None:
    sampler = FakeSampler("a")
    decoder = create(model, sampler, sampling=Sampling(grammar='root ::= "a"'))
    sampler.failure = NativeError(Status.GRAMMAR, "the grammar is too ambiguous: do this")
    with pytest.raises(RequestError) as caught:
        decoder.next_tokens(4)
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "grammar")
    assert caught.value.message == "the grammar is too ambiguous: do this"


@pytest.mark.parametrize("grammar", [None, 'root ::= "a"'])
def test_aborted_sampling_is_no_error(model: FakeModel, grammar: str | None) -> None:
    sampler = FakeSampler("a")
    decoder = create(model, sampler, sampling=Sampling(grammar=grammar))
    sampler.failure = NativeError(Status.ABORTED, "aborted")
    with pytest.raises(RequestAbortedError):
        decoder.next_tokens(4)


# ── rows ────────────────────────────────────────────────────────────────────────────────────────


def test_rows_are_those_that_chose_the_tokens(model: FakeModel) -> None:
    decoder = create(model)
    assert (len(decoder.next_tokens(9)), decoder.rows()) == (1, [-1])
    assert (len(decoder.next_tokens(9)), decoder.rows()) == (3, [0, 2, 4])
    assert (len(decoder.next_tokens(2)), decoder.rows()) == (2, [0, 2])
    plain = create(model, speculation=OFF)
    for _ in range(2):
        assert (len(plain.next_tokens(9)), plain.rows()) == (1, [-1])


def test_rows_of_a_step_that_failed_are_those_of_the_plain_token(speculator: FakeSpeculator) -> None:
    model = FailingModel(speculator)
    decoder = create(model, sampling=Sampling(grammar='root ::= "abcd"'))
    for _ in range(3):
        decoder.next_tokens(5)
        assert decoder.rows() == [-1]


@pytest.mark.parametrize(
    ("code", "grammar"), [("numeric_error", None), ("numeric_error", 'root ::= "a"'), ("internal", None)]
)
def test_other_failures_of_a_step_are_the_requests(
    speculator: FakeSpeculator, code: str, grammar: str | None
) -> None:
    model = FailingModel(speculator)
    model.code = code
    decoder = create(model, sampling=Sampling(grammar=grammar))
    decoder.next_tokens(5)
    with pytest.raises(RequestError) as caught:
        decoder.next_tokens(4)
    assert caught.value.code == code
    assert kv_text(model) == ""


def test_figures_that_cannot_be_read_do_not_fail_the_answer(
    model: FakeModel,
    speculator: FakeSpeculator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = speculator.report

    def report() -> dict[str, Any]:
        if speculator.steps:
            raise NativeError(Status.NO_MEMORY, "no memory")
        return whole()

    monkeypatch.setattr(speculator, "report", report)
    steps, finished = Answerer(model, monkeypatch, "abcd.").answer()
    assert "".join(step.content for step in steps) == "abcd"
    assert (finished.reason, finished.timings.speculation) == ("stop", None)
    assert "is not known" in caplog.text


def test_failure_inside_drafting_is_said_in_the_log(
    model: FakeModel,
    speculator: FakeSpeculator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    speculator.detail = "the draft's graph cannot be built"
    with caplog.at_level(logging.WARNING):
        Answerer(model, monkeypatch, "abc.").answer()
    assert [record.getMessage() for record in caplog.records] == [
        "the response went on without speculation: the draft's graph cannot be built"
    ]
