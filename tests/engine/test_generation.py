"""What becomes of a request's options and of the parts of an answer, on a model without a library."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from answerer import PROMPT, SCRIPTED, Answerer
from fake_model import FakeModel, FakeSpeculator
from fake_vocabulary import CONTROL, END

from s2moe.engine import generation
from s2moe.engine.errors import RequestError
from s2moe.engine.messages import Finished, Sampling, Speculation, Step
from s2moe.engine.native import NativeError, Status

OFF = Speculation(method="off")


@pytest.fixture
def model() -> FakeModel:
    model = FakeModel(FakeSpeculator(width=3))
    model.n_ctx = 256
    model.chat_template.chat = {"format": SCRIPTED}
    return model


def refusal(model: FakeModel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        Answerer(model, monkeypatch, "x.").answer(**options)
    return caught.value


def arguments_of(steps: list[Step], index: int) -> str:
    return "".join(delta.arguments for step in steps for delta in step.tool_calls if delta.index == index)


# ── tool calls and reasoning ────────────────────────────────────────────────────────────────────


def test_each_call_gets_an_id_once(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, finished = Answerer(model, monkeypatch, "well[add|{1}][sub|{2}].").answer()
    heads = [delta for step in steps for delta in step.tool_calls if delta.name or delta.id]
    assert [(delta.index, delta.name, delta.arguments) for delta in heads] == [(0, "add", ""), (1, "sub", "")]
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", delta.id) for delta in heads)
    assert heads[0].id != heads[1].id
    assert [arguments_of(steps, index) for index in (0, 1)] == ["{1}", "{2}"]
    assert "".join(step.content for step in steps) == "well"
    assert finished.reason == "tool_calls"
    other, _ = Answerer(model, monkeypatch, "[add|{1}].").answer()
    assert other[0].tool_calls[0].id != heads[0].id


def call_ids(
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    *written: str,
    calls: Sequence[str] = (),
    **options: Any,
) -> list[str]:
    """Of an answer whose calls the model gave the ids `written`, after messages with `calls`."""
    history = {"role": "assistant", "content": "ask", "tool_calls": [{"id": call_id} for call_id in calls]}
    text = "".join(f"[f#{call_id}|{{}}]" for call_id in written)
    answerer = Answerer(model, monkeypatch, f"{text}{chr(END)}")
    steps, _ = answerer.answer(messages_json=json.dumps([history]).encode(), **options)
    return [delta.id for step in steps for delta in step.tool_calls if delta.id]


def test_id_that_the_model_wrote_is_kept_once(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call_ids(model, monkeypatch, "f:0", "f:1", calls=["f:2"]) == ["f:0", "f:1"]
    first, second = call_ids(model, monkeypatch, "f:0", "f:0")
    assert first == "f:0"
    assert re.fullmatch("call_[A-Za-z0-9]{24}", second)
    (again,) = call_ids(model, monkeypatch, "f:0", calls=["f:0", "f:1"])
    assert re.fullmatch("call_[A-Za-z0-9]{24}", again)


@pytest.mark.parametrize("written", ["two words", "x" * 129, "<id>"])
def test_text_that_is_no_id_is_not_kept(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    model.n_ctx = 1024
    (call_id,) = call_ids(model, monkeypatch, written)
    assert re.fullmatch("call_[A-Za-z0-9]{24}", call_id)


def test_later_choices_have_ids_of_their_own(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    (call_id,) = call_ids(model, monkeypatch, "f:0", own_call_ids=True)
    assert re.fullmatch("call_[A-Za-z0-9]{24}", call_id)


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("[f|{}].", {}, "tool_calls"),
        ("no call.", {}, "stop"),
        ("[f|{}]more", {"max_tokens": 10}, "length"),
        ("[f|{", {"max_tokens": 4}, "length"),
        ("[f|{}] halt.", {"stop": ["halt"]}, "tool_calls"),
        ("[f|{}][g|{halt.", {"stop": ["halt"]}, "stop"),
        ("[f|{}][g|halt.", {"stop": ["halt"]}, "stop"),
        ("none halt.", {"stop": ["halt"]}, "stop"),
        ("[f|{}]~~", {}, "tool_calls"),
        ("thus~~", {}, "stop"),
    ],
    ids=[
        *(
            "call",
            "none",
            "length",
            "cut",
            "stop behind a call",
            "stop within a call",
            "stop before arguments",
        ),
        *("stop without a call", "turn's stop", "turn's stop alone"),
    ],
)
def test_reason_is_tool_calls_when_the_model_ends_its_turn(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, text: str, options: dict[str, Any], reason: str
) -> None:
    model.chat_template.chat["stops"] = ["~~"]
    _, finished = Answerer(model, monkeypatch, text).answer(**options)
    assert finished.reason == reason
    assert finished.stop_string == (options["stop"][0] if "stop" in options else None)


@pytest.mark.parametrize(
    ("text", "stop", "content", "reasoning", "arguments"),
    [
        ("(think hard)say[f|{a}]x.", "hard", "", "think ", ""),
        ("(think hard)say[f|{a}]x.", "hard)sa", "", "think ", ""),
        ("(think hard)say[f|{a}]x.", "say[f", "", "think hard", ""),
        ("(think hard)say[f|{a}]x.", "a}]x", "say", "think hard", "{"),
        ("(think hard)say[f|{a}]x.", "never", "sayx", "think hard", "{a}"),
    ],
)
def test_stop_strings_are_found_across_reasoning_and_calls(
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    stop: str,
    content: str,
    reasoning: str,
    arguments: str,
) -> None:
    steps, finished = Answerer(model, monkeypatch, text).answer(stop=[stop])
    assert "".join(step.content for step in steps) == content
    assert "".join(step.reasoning for step in steps) == reasoning
    assert arguments_of(steps, 0) == arguments
    assert finished.stop_string == (stop if stop in text else None)
    assert sum(step.n_tokens for step in steps) == finished.n_completion_tokens


def test_reasoning_tokens_are_those_before_the_content(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, finished = Answerer(model, monkeypatch, "(abc)de.").answer()
    # `(` came with a; `)` with d
    assert (finished.n_reasoning_tokens, finished.n_completion_tokens) == (4, 8)


def test_budget_used_up_while_thinking_is_length(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, finished = Answerer(model, monkeypatch, "(abcdef)g.").answer(max_tokens=5)
    assert [step.content for step in steps if step.content] == []
    assert (finished.reason, finished.n_reasoning_tokens, finished.n_completion_tokens) == ("length", 5, 5)


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options", [{"prompt": "say (x"}, {"prompt_tokens": [ord(letter) for letter in "say (x"]}]
)
def test_raw_prompt_is_continued_without_a_parser(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model.chat_template.chat["stops"] = ["]"]
    answerer = Answerer(model, monkeypatch, "y)[f|{}].")
    steps, finished = answerer.answer(messages_json=b"", **options)
    assert "".join(step.content for step in steps) == "y)[f|{}]"
    assert (finished.reason, finished.n_prompt_tokens) == ("stop", 6)
    assert "".join(map(chr, answerer.sampler.prompt)) == "say (x"
    assert model.chat_template.requests == []


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"messages_json": b"", "prompt": ""}, "prompt"),
        ({"messages_json": b"", "prompt_tokens": []}, "prompt"),
        ({"messages_json": b"", "prompt_tokens": [97, -1]}, "prompt"),
        ({"messages_json": b"", "prompt_tokens": [1 << 21]}, "prompt"),
        ({"messages_json": b"", "prompt": "a", "prompt_tokens": [97]}, "prompt"),
        ({"prompt": "a"}, "prompt"),
        ({"messages_json": b""}, "messages"),
        ({"messages_json": b'{"role": "user"}'}, "messages"),
        ({"messages_json": b'["hi"]'}, "messages"),
        ({"messages_json": b'[{"role": "user", "content": ["hi"]}]'}, "messages"),
        ({"messages_json": b'[{"role": "user", "content": "\\ud800"}]'}, "messages"),
        ({"messages_json": b"[" * 100_000}, "messages"),
        ({"chat_options_json": b"[]"}, None),
        ({"chat_options_json": b'{"messages": []}'}, None),
        ({"chat_options_json": b"{" * 100_000}, None),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n_top_logprobs": 21}, "top_logprobs"),
        ({"n_top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_contradictory_or_broken_requests_are_refused(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], param: str | None
) -> None:
    error = refusal(model, monkeypatch, **options)
    assert (error.code, error.param) == ("invalid_value", param)
    assert model.n_decodes == 0


@pytest.mark.parametrize(
    ("options", "param", "n_tokens"),
    [
        ({"messages_json": b"", "prompt": "x" * 256}, "prompt", 256),
        ({"messages_json": b"", "prompt_tokens": [97] * 256}, "prompt", 256),
        ({"messages_json": b'[{"content": "%b"}]' % (b"x" * 256)}, "messages", 256),
        ({"messages_json": b"", "prompt": "x" * 4096}, "prompt", 1024),
        ({"messages_json": b'[{"content": "%b"}]' % (b"x" * 4096)}, "messages", 1024),
    ],
)
def test_prompt_that_leaves_no_room_is_refused_with_both_numbers(
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    param: str,
    n_tokens: int,
) -> None:
    error = refusal(model, monkeypatch, **options)
    assert (error.code, error.param) == ("context_length_exceeded", param)
    assert (error.n_prompt_tokens, error.n_ctx) == (n_tokens, 256)
    assert "maximum context length is 256 tokens" in error.message
    is_hopeless = n_tokens == 1024
    assert ("at least 1024" in error.message) == is_hopeless
    if is_hopeless:
        assert model.vocabulary.tokenized == []


def test_long_rendering_of_short_messages_is_not_tokenised(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.chat_template.chat["prompt"] = "tools " * 1000
    error = refusal(model, monkeypatch)
    assert error.code == "context_length_exceeded"
    assert model.vocabulary.tokenized == []


def test_messages_and_options_reach_the_template(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    options = b' {"tools": [{"type": "function"}], "continue_final_message": true}\n'
    messages = b'[{"role": "assistant", "content": null, "tool_calls": []}, {"role": "tool", "content": "3"}]'
    Answerer(model, monkeypatch, "x.").answer(messages_json=messages, chat_options_json=options)
    Answerer(model, monkeypatch, "x.").answer(chat_options_json=b" { } ")
    assert model.chat_template.requests == [
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "tool", "content": "3"},
            ],
            "tools": [{"type": "function"}],
            "continue_final_message": True,
        },
        {"messages": [{"role": "user", "content": PROMPT}]},
    ]


NAMED = "tools[0].function.parameters at #/properties: no such type"


@pytest.mark.parametrize(
    ("status", "message", "options", "code", "param"),
    [
        (Status.TEMPLATE, "no system role here", b"{}", "template_error", "messages"),
        (Status.INVALID, "something is amiss", b"{}", "invalid_value", "messages"),
        (Status.INVALID, "messages[1].content is odd", b"{}", "invalid_value", "messages[1].content"),
        (Status.INVALID, "tools[2] is no object", b"{}", "invalid_value", "tools[2]"),
        (Status.GRAMMAR, NAMED, b'{"tools": [{}]}', "invalid_schema", "tools[0].function.parameters"),
        (Status.GRAMMAR, "too many rules", b'{"tools": [{}]}', "invalid_schema", "tools"),
        (
            *(Status.GRAMMAR, "json_schema at #/x: no", b'{"json_schema": {}, "tools": [{}]}'),
            *("invalid_schema", "response_format"),
        ),
        (Status.NO_MEMORY, "out of memory", b"{}", "insufficient_memory", None),
    ],
)
def test_refusals_of_the_template_name_the_field(
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    status: Status,
    message: str,
    options: bytes,
    code: str,
    param: str | None,
) -> None:
    model.chat_template.failure = NativeError(status, message)
    error = refusal(model, monkeypatch, chat_options_json=options)
    assert (error.code, error.param) == (code, param)
    assert message in error.message


# ── grammars ────────────────────────────────────────────────────────────────────────────────────

GRAMMAR_OF_CHAT = {
    "grammar": 'root ::= "x"',
    "grammar_lazy": True,
    "grammar_triggers": [{"type": 1, "value": "<tool>", "token": 0}],
    "preserved_tokens": ["<control>"],
    "generation_prompt": "<think>",
    "thinking": {"start": "<think>", "end": "</think>"},
}


def test_grammar_of_the_template_goes_to_the_sampler_with_all_that_belongs_to_it(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.chat_template.chat |= GRAMMAR_OF_CHAT
    answerer = Answerer(model, monkeypatch, "x.")
    answerer.answer(sampling=Sampling(temperature=0), chat_options_json=b'{"json_schema": {}}')
    assert answerer.params == {"temperature": 0, **GRAMMAR_OF_CHAT}


def test_own_grammar_goes_without_the_templates(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    thinking = {"start": "<think>"}
    model.chat_template.chat |= {"generation_prompt": "<think>", "grammar": "", "thinking": thinking}
    answerer = Answerer(model, monkeypatch, "x.")
    chat_options = b'{"tools": [{"type": "function"}], "tool_choice": "none"}'
    answerer.answer(sampling=Sampling(grammar='root ::= "x"'), chat_options_json=chat_options)
    assert answerer.params == {"grammar": 'root ::= "x"', "thinking": thinking}
    raw = Answerer(model, monkeypatch, "x.")
    raw.answer(sampling=Sampling(grammar='root ::= "x"'), messages_json=b"", prompt="a")
    assert raw.params == {"grammar": 'root ::= "x"'}


@pytest.mark.parametrize(
    ("options", "named"), [(b'{"tools": [{}]}', "tools"), (b'{"json_schema": {}}', "response_format")]
)
def test_two_grammars_are_refused(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, options: bytes, named: str
) -> None:
    error = refusal(model, monkeypatch, sampling=Sampling(grammar='root ::= "x"'), chat_options_json=options)
    assert (error.code, error.param) == ("invalid_value", "grammar")
    assert named in error.message


@pytest.mark.parametrize(
    ("sampling", "options", "code", "param"),
    [
        (Sampling(grammar="root ::= ("), b"{}", "invalid_grammar", "grammar"),
        (Sampling(), b'{"json_schema": {}}', "invalid_schema", "response_format"),
        (Sampling(), b'{"tools": [{}]}', "invalid_schema", "tools"),
    ],
)
def test_grammar_that_the_sampler_refuses_is_the_error_of_its_field(
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    sampling: Sampling,
    options: bytes,
    code: str,
    param: str,
) -> None:
    if not sampling.grammar:
        model.chat_template.chat |= GRAMMAR_OF_CHAT

    def refuse(*_arguments: object) -> None:
        raise NativeError(Status.GRAMMAR, "the grammar does not parse")

    answerer = Answerer(model, monkeypatch, "x.")
    monkeypatch.setattr(generation, "Sampler", refuse)
    with pytest.raises(RequestError, match="does not parse") as caught:
        answerer.answer(sampling=sampling, chat_options_json=options)
    assert (caught.value.code, caught.value.param) == (code, param)


# ── control tokens ──────────────────────────────────────────────────────────────────────────────


def test_control_tokens_are_text_only_if_wanted(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [ord("a"), CONTROL, ord("b"), END]
    for preserved, text in (
        ([], "ab"),
        (["<control>"], "a<control>b"),
        (["call<control>:"], "a<control>b"),
        (["control"], "ab"),
    ):
        model.chat_template.chat["preserved_tokens"] = preserved
        steps, finished = Answerer(model, monkeypatch, tokens).answer()
        assert "".join(step.content for step in steps) == text
        assert finished.n_completion_tokens == 4


def test_ignore_eos_forbids_every_end(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.vocabulary.ends = [END, 7]
    answerer = Answerer(model, monkeypatch, "x.")
    answerer.answer(ignore_eos=True, sampling=Sampling(logit_bias={97: 2.0, END: 100.0}))
    never = generation.NEVER
    assert answerer.params["logit_bias"] == [[97, 2.0], [END, 100.0], [END, never], [7, never]]
    plain = Answerer(model, monkeypatch, "x.")
    plain.answer()
    assert "logit_bias" not in plain.params


# ── log probabilities ───────────────────────────────────────────────────────────────────────────


def test_each_token_has_its_own_row_and_ends_have_none(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, finished = Answerer(model, monkeypatch, "abcdef.").answer(n_top_logprobs=2)
    assert [step.n_tokens for step in steps] == [1] * 7
    assert [[each.piece for each in step.logprobs] for step in steps] == [
        *([[letter.encode()] for letter in "abcdef"]),
        [],
    ]
    assert steps[1].logprobs[0].token == ord("b")
    assert steps[1].logprobs[0].logprob == -ord("b") / 1000
    top = steps[1].logprobs[0].top
    assert [(each.token, each.piece, each.logprob) for each in top] == [(97, b"a", 0.0), (98, b"b", -0.1)]
    # the prompt's, and then the rows of two steps of three: the last one is the end's
    assert model.library.rows == [-1, 0, 2, 4, 0, 2]
    assert finished.n_completion_tokens == 7
    model.library.rows.clear()
    Answerer(model, monkeypatch, "abcdef.").answer(n_top_logprobs=0, speculation=OFF)
    assert model.library.rows == [-1] * 6


def test_no_logits_are_read_when_nobody_asks(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, _ = Answerer(model, monkeypatch, "abc.").answer()
    assert all(step.logprobs == [] for step in steps)
    assert model.library.rows == []


def test_tokens_without_text_keep_their_place(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control tokens and markup are tokens of the answer; their text is that of the token."""
    tokens = [ord("("), CONTROL, ord("a"), ord(")"), ord("b"), END]
    steps, _ = Answerer(model, monkeypatch, tokens).answer(n_top_logprobs=0)
    assert [(step.n_tokens, [each.piece for each in step.logprobs]) for step in steps] == [
        (3, [b"(", b"<control>", b"a"]),
        (2, [b")", b"b"]),
        (1, []),
    ]


def test_failure_of_log_probabilities_is_the_requests(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.library.failure = NativeError(Status.NUMERIC, "NaN")
    assert refusal(model, monkeypatch, n_top_logprobs=0).code == "numeric_error"


def test_abort_before_the_prompt_is_tokenised(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.abort.requested = True
    (event,) = Answerer(model, monkeypatch, "x.").start(prompt="x", messages_json=b"").run()
    assert isinstance(event, Finished)
    assert event.reason == "cancelled"
    assert model.vocabulary.tokenized == []


# ── strict schemas ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lost", "strict", "is_refused"),
    [
        (["json_schema at #/properties/x: multipleOf"], True, True),
        (["json_schema at #/properties/x: multipleOf"], False, False),
        (["json_schema at #/properties/x: format"], True, False),
        (["tools[0].function.parameters at #: uniqueItems"], True, False),
        ([], True, False),
    ],
)
def test_strict_schema_that_cannot_be_enforced_is_refused(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, lost: list[str], strict: bool, is_refused: bool
) -> None:
    model.chat_template.chat["unenforced"] = lost
    options = json.dumps({"json_schema": {"type": "object"}, "strict_schema": strict}).encode()
    answerer = Answerer(model, monkeypatch, "x.")
    if not is_refused:
        answerer.answer(chat_options_json=options)
        return
    with pytest.raises(RequestError, match="multipleOf") as caught:
        answerer.answer(chat_options_json=options)
    assert (caught.value.code, caught.value.param) == ("invalid_schema", "response_format")
