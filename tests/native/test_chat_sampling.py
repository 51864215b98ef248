"""Grammars of chats in the sampler: calls and schemas that a random model cannot but follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from s2moe.engine.native import Library, NativeError, Sampler, Status

from chat_rig import USER, GrammarOracle, apply, parse, template_text
from speculation_model import EXACT, SpeculationModel, prefilled
from stored_model import PROMPT

pytestmark = pytest.mark.usefixtures("batch_invariance")

QWEN3 = "Qwen-Qwen3-0.6B"
COLOUR = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {
                "colour": {"enum": ["red", "green"]},
                "walls": {"type": "integer", "maximum": 4, "minimum": 1},
            },
            "required": ["colour", "walls"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
FORCED = [
    *(QWEN3, "olmoe", "deepseek-ai-DeepSeek-V3.1", "mixtral", "meta-llama-Llama-3.1-8B-Instruct"),
    *("mistralai-Mistral-Nemo-Instruct-2407", "Kimi-K2-Instruct"),
]
KEYS = ("grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens", "generation_prompt", "thinking")


@pytest.fixture(scope="module")
def model(expert_model: Callable[[str], Path], batch_invariance: None) -> Iterator[SpeculationModel]:
    with SpeculationModel(expert_model("q4_0"), n_ctx=512) as model:
        yield model


def constrained(chat_json: bytes, **sampling: Any) -> dict[str, Any]:
    chat = json.loads(chat_json)
    return {key: chat[key] for key in KEYS} | sampling


def answer_tokens(model: SpeculationModel, sampling: dict[str, Any], n_max: int = 200) -> list[int]:
    """Sampled tokens, the one that ends the answer included if it comes."""
    sampler = prefilled(model, PROMPT, sampling)
    tokens: list[int] = []
    token = PROMPT[-1]
    try:
        for position in range(len(PROMPT) - 1, len(PROMPT) - 1 + n_max):
            model.library.decode(model.context, [token], position)
            token = sampler.sample(model.context)
            tokens.append(token)
            if llama_cpp.llama_vocab_is_eog(model.vocab, token):
                break
    finally:
        sampler.close()
    return tokens


def answer_of(model: SpeculationModel, sampling: dict[str, Any], n_max: int = 200) -> tuple[str, bool]:
    """Sampled text, and whether it ended by itself."""
    tokens = answer_tokens(model, sampling, n_max)
    ended = bool(llama_cpp.llama_vocab_is_eog(model.vocab, tokens[-1]))
    return model.detokenize(tokens[:-1] if ended else tokens), ended


@pytest.mark.parametrize("template", FORCED)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_required_forces_a_call(library: Library, model: SpeculationModel, template: str, seed: int) -> None:
    source = template_text(template)
    chat = apply(library, source, tools=[COLOUR], tool_choice="required", enable_thinking=False)
    text, ended = answer_of(model, constrained(chat, temperature=1.5, seed=seed))
    assert ended, text
    answer = parse(library, chat, [text])
    assert (answer.content, answer.reasoning) == ("", "")
    assert [call.name for call in answer.calls] == ["paint"]
    arguments = json.loads(answer.calls[0].arguments)
    assert arguments["colour"] in ("red", "green")
    assert 1 <= arguments["walls"] <= 4


@pytest.mark.parametrize("template", [QWEN3, "olmoe", "meta-llama-Llama-3.1-8B-Instruct"])
def test_schema_forces_json(library: Library, model: SpeculationModel, template: str) -> None:
    chat = apply(library, template_text(template), json_schema=SCHEMA, enable_thinking=False)
    text, ended = answer_of(model, constrained(chat, temperature=1.5, seed=3))
    assert ended, text
    assert set(json.loads(parse(library, chat, [text]).content)) == {"answer", "sure"}


@pytest.mark.parametrize("options", [{"json_schema": SCHEMA}, {"tools": [COLOUR], "tool_choice": "required"}])
def test_constrained_answers_are_the_same_with_speculation(
    library: Library, model: SpeculationModel, options: dict[str, Any]
) -> None:
    chat = apply(library, template_text(QWEN3), enable_thinking=False, **options)
    sampling = constrained(chat, temperature=0.8, seed=7)
    expected = answer_tokens(model, sampling)
    assert llama_cpp.llama_vocab_is_eog(model.vocab, expected[-1])
    answer = model.answer(PROMPT, len(expected), EXACT | {"draft_experts": 2}, sampling)
    assert answer.tokens == expected
    assert answer.report["n_admitted"] > 0


def test_reasoning_is_free_of_the_schema(library: Library, model: SpeculationModel) -> None:
    value = '{"answer": "yes", "sure": true}'
    for template, before in (
        (QWEN3, "<think>\nno { JSON\n</think>\n\n"),
        ("Qwen-QwQ-32B", "no { JSON\n</think>\n\n"),
        (
            "openai-gpt-oss-120b",
            "<|channel|>analysis<|message|>no { JSON<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
    ):
        chat = apply(library, template_text(template), json_schema=SCHEMA)
        oracle = GrammarOracle.of_chat(model, chat)
        assert oracle.allows(before + value)
        assert not oracle.allows(before + "yes")
        assert not oracle.allows(before)
        answer = parse(library, chat, before + value)
        assert (answer.content, answer.reasoning.strip()) == (value, "no { JSON")


def test_a_call_or_json(library: Library, model: SpeculationModel) -> None:
    chat = apply(library, template_text("olmoe"), json_schema=SCHEMA, tools=[COLOUR])
    oracle = GrammarOracle.of_chat(model, chat)
    call = '<tool_call>{"name": "paint", "arguments": {"colour": "red", "walls": 2}}</tool_call>'
    assert oracle.allows('{"answer": "no", "sure": false}')
    assert oracle.allows(call)
    for text in ("no", call.replace("red", "blue"), '{"answer": "maybe", "sure": false}', "Well, " + call):
        assert not oracle.allows(text)


def thinking(**more: Any) -> dict[str, Any]:
    return {"start": "<think>", "ends": ["</think>"], "content_starts": ["e"], "is_open": True} | more


GRAMMAR = 'root ::= "yes" | "no"'


def free(model: SpeculationModel, liked: str, bias: float) -> dict[str, Any]:
    """Sampling of letters, one of them more than others."""
    letters = {token for letter in "abcdefghij" for token in model.tokenize(letter)}
    biases = [[token, 20.0] for token in sorted(letters - set(model.tokenize(liked)))]
    return {
        "temperature": 0.9,
        "seed": 5,
        "logit_bias": [*biases, *([token, bias] for token in model.tokenize(liked))],
    }


def test_grammar_of_a_client_waits_for_the_end_of_reasoning(model: SpeculationModel) -> None:
    sampling = free(model, "e", 20.0)
    unbound, _ = answer_of(model, sampling)
    text, ended = answer_of(model, sampling | {"grammar": GRAMMAR, "thinking": thinking()})
    assert ended
    thought = text.removesuffix("yes").removesuffix("no")
    assert len(thought) == len(text) - len("yes") or len(thought) == len(text) - len("no")
    assert thought.index("e") == len(thought) - 1
    assert unbound.startswith(thought), "reasoning is as it would be without the grammar"
    bare, _ = answer_of(model, sampling | {"grammar": GRAMMAR})
    assert bare in ("yes", "no")


def test_reasoning_that_the_model_does_not_begin_is_not_waited_for(model: SpeculationModel) -> None:
    sampling = free(model, "b", 80.0) | {"temperature": 0, "grammar": GRAMMAR}
    text, _ = answer_of(model, sampling | {"thinking": thinking(is_open=False)})
    assert text in ("yes", "no")
    begun = thinking(is_open=False, start="bbb", content_starts=["bbbbb"])
    text, _ = answer_of(model, sampling | {"thinking": begun})
    assert text in ("bbbbbyes", "bbbbbno")


def lazy(**more: Any) -> dict[str, Any]:
    return {
        "grammar": 'root ::= "e" "yes"',
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 1, "value": "e", "token": -1}],
        "preserved_tokens": [],
        "generation_prompt": "",
    } | more


def test_lazy_grammar_waits_for_its_trigger(model: SpeculationModel) -> None:
    text, ended = answer_of(model, free(model, "e", 20.0) | lazy())
    assert ended
    assert text.endswith("eyes")
    assert text.count("e") == 2


def test_lazy_grammar_is_not_triggered_by_reasoning(model: SpeculationModel) -> None:
    begun = thinking(start="<|im_start|>", ends=["<|im_end|>"], content_starts=["<|im_end|>"])
    sampling = free(model, "e", 20.0) | lazy(generation_prompt="<|im_start|>", thinking=begun)
    text, ended = answer_of(model, sampling, 100)
    assert not ended
    assert text.count("e") > 2


def test_grammar_that_no_token_can_follow_is_an_error(model: SpeculationModel) -> None:
    with pytest.raises(NativeError) as caught:
        answer_of(model, {"grammar": r'root ::= "a" [^\x01-\UFFFFFFFF]'})
    assert caught.value.status == Status.INTERNAL


@pytest.mark.parametrize("said", ["hello", "<|im_end|>", '{"answer": "maybe'])
def test_a_continued_message_must_fit_the_schema(
    library: Library, model: SpeculationModel, said: str
) -> None:
    messages = [*USER, {"role": "assistant", "content": said}]
    chat = apply(
        library, template_text("olmoe"), messages=messages, continue_final_message=True, json_schema=SCHEMA
    )
    with pytest.raises(NativeError, match="the message to continue") as caught:
        Sampler(library, model._model, constrained(chat))
    assert caught.value.status == Status.GRAMMAR


def test_a_continued_message_goes_on_in_its_schema(library: Library, model: SpeculationModel) -> None:
    messages = [*USER, {"role": "assistant", "content": '{"answer": "n'}]
    chat = apply(
        library, template_text("olmoe"), messages=messages, continue_final_message=True, json_schema=SCHEMA
    )
    text, ended = answer_of(model, constrained(chat, temperature=1, seed=2))
    assert ended
    assert json.loads('{"answer": "n' + parse(library, chat, text).content)["answer"] == "no"


@pytest.mark.parametrize(
    "broken",
    [
        {"grammar_triggers": []},
        {"grammar_triggers": [{"type": 9, "value": "e"}]},
        {"grammar_triggers": [{"type": 0, "value": "", "token": -1}]},
        {"grammar_triggers": [{"type": 2, "value": "(", "token": -1}]},
        {"grammar_triggers": "e"},
        {"preserved_tokens": [5]},
        {"thinking": {"start": 5}},
    ],
)
def test_broken_keys_of_a_chat_are_errors(
    library: Library, model: SpeculationModel, broken: dict[str, Any]
) -> None:
    with pytest.raises(NativeError) as caught:
        Sampler(library, model._model, lazy(**broken))
    assert caught.value.status in (Status.INVALID, Status.GRAMMAR)
