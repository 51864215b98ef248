"""Log probabilities, raw prompts, tools and schemas in the engine process, with and without speculation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_rig import Chat, EngineProcess

from s2moe.engine import messages as wire

TEMPLATES = Path(__file__).parents[2] / "build/native/s2moe/source/models/templates"
FRANCE = ("user", "What is the capital of France?")
STORY = ("user", "Tell me a long story about a river and the people who live beside it.")
OFF = wire.Speculation(method="off")
FORCED = wire.Speculation(exact=True, adaptive=False)
"""Drafts in every step, whether they pay or not."""
GREEDY = wire.Sampling(temperature=0)
START = "<|im_start|>"

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": CITY},
    }
]


def load(model: Path, **options: Any) -> EngineProcess:
    engine = EngineProcess()
    # one thread: two are slow where other processes want the processors
    options |= {"n_ctx": 2048, "n_batch": 256, "n_threads": 1, "speculation": wire.Speculation()}
    ready = engine.load(model, **options)
    assert isinstance(ready, wire.Ready), ready
    return engine


@pytest.fixture(scope="module")
def chat(tiny_model_path: Path) -> Iterator[Chat]:
    """The model's own template, which knows of neither tools nor reasoning."""
    engine = load(tiny_model_path)
    yield Chat(engine)
    engine.close()


@pytest.fixture(scope="module")
def qwen(tiny_model_path: Path) -> Iterator[Chat]:
    """A template with tools and reasoning, whose control tokens the model has, too."""
    engine = load(tiny_model_path, chat_template=(TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text())
    yield Chat(engine)
    engine.close()


def answer(
    chat: Chat, *messages: tuple[str, str], chat_options: dict[str, Any] | None = None, **options: Any
) -> tuple[list[wire.Step], wire.Finished]:
    if chat_options is not None:
        options["chat_options_json"] = json.dumps(chat_options).encode()
    chat.engine.send(chat.request(*messages, **options))
    received = chat.engine.receive_until(wire.Finished, wire.Failed)
    finished = received[-1]
    assert isinstance(finished, wire.Finished), finished
    steps = [message for message in received if isinstance(message, wire.Step)]
    assert sum(step.n_tokens for step in steps) == finished.n_completion_tokens
    return steps, finished


def refusal(chat: Chat, chat_options: dict[str, Any], **options: Any) -> wire.Failed:
    return chat.fail(FRANCE, chat_options_json=json.dumps(chat_options).encode(), **options)


def content_of(steps: list[wire.Step]) -> str:
    return "".join(step.content for step in steps)


def logprobs_of(steps: list[wire.Step]) -> list[wire.TokenLogprob]:
    return [each for step in steps for each in step.logprobs]


def raw(chat: Chat, **options: Any) -> tuple[list[wire.Step], wire.Finished]:
    """The answer to a prompt that is no conversation."""
    chat.engine.send(wire.Generate(request_id="raw", sampling=GREEDY, speculation=OFF, **options))
    received = chat.engine.receive_until(wire.Finished, wire.Failed)
    finished = received[-1]
    assert isinstance(finished, wire.Finished), finished
    return [message for message in received if isinstance(message, wire.Step)], finished


def render(chat: Chat, *messages: tuple[str, str], **options: Any) -> str:
    content = [{"role": role, "content": text} for role, text in messages]
    query = wire.ApplyTemplate(
        query_id="a",
        messages_json=json.dumps(content).encode(),
        chat_options_json=json.dumps(options).encode(),
    )
    chat.engine.send(query)
    reply = chat.engine.receive_until(wire.Rendered, wire.QueryFailed)[-1]
    assert isinstance(reply, wire.Rendered), reply
    return reply.prompt


# ── log probabilities ───────────────────────────────────────────────────────────────────────────


def test_log_probabilities_are_those_of_the_models_own_distribution(chat: Chat) -> None:
    steps, finished = answer(chat, STORY, n_top_logprobs=20, max_tokens=40, speculation=OFF)
    found = logprobs_of(steps)
    assert len(found) == finished.n_completion_tokens == 40
    assert b"".join(each.piece for each in found).decode() == content_of(steps)
    for each in found:
        values = [top.logprob for top in each.top]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert (each.top[0].token, each.top[0].logprob) == (each.token, each.logprob), "greedy"
        assert values[0] <= 0
        assert 0.3 < sum(map(math.exp, values)) < 1.001
    cold = wire.Sampling(temperature=0.01, seed=3, frequency_penalty=1.0, logit_bias={100: -5.0})
    biased, _ = answer(chat, STORY, n_top_logprobs=0, max_tokens=8, sampling=cold, speculation=OFF)
    # the prompt's logits are the same, whatever the sampler makes of them
    first = {each.token: each.logprob for each in found[0].top}
    assert logprobs_of(biased)[0].logprob == first[logprobs_of(biased)[0].token]
    assert all(each.top == [] for each in logprobs_of(biased))


@pytest.mark.parametrize(
    "sampling", [GREEDY, wire.Sampling(temperature=1.0, seed=7)], ids=["greedy", "sampled"]
)
def test_speculation_changes_no_log_probability(chat: Chat, sampling: wire.Sampling) -> None:
    answer(chat, STORY, max_tokens=1, speculation=OFF)  # the same cut of the prompt for both
    options: dict[str, Any] = {"n_top_logprobs": 5, "max_tokens": 64, "sampling": sampling}
    plain, _ = answer(chat, STORY, speculation=OFF, **options)
    drafted, finished = answer(chat, STORY, speculation=FORCED, **options)
    report = finished.timings.speculation
    assert report is not None
    assert report.n_accepted > 0
    assert logprobs_of(drafted) == logprobs_of(plain)
    assert [len(step.logprobs) for step in drafted] == [step.n_tokens for step in drafted]


@pytest.mark.parametrize("speculation", [OFF, FORCED], ids=["plain", "drafted"])
def test_ends_and_stop_strings_have_no_log_probabilities(chat: Chat, speculation: wire.Speculation) -> None:
    steps, finished = answer(chat, FRANCE, n_top_logprobs=0, speculation=speculation)
    assert finished.reason == "stop"
    found = logprobs_of(steps)
    assert len(found) == finished.n_completion_tokens - 1
    whole = content_of(steps)
    for stop in (whole[5:9], whole[12:13], whole[-6:-1]):
        steps, finished = answer(chat, FRANCE, n_top_logprobs=0, stop=[stop], speculation=speculation)
        assert content_of(steps) == whole[: whole.index(stop)]
        pieces = [each.piece for each in logprobs_of(steps)]
        assert pieces == [each.piece for each in found[: len(pieces)]]
        # all that is shown, and no token that begins in the stop string
        text = b"".join(pieces).decode()
        assert text.startswith(content_of(steps))
        assert not pieces or len(b"".join(pieces[:-1])) < len(content_of(steps).encode())
        assert all(len(step.logprobs) == step.n_tokens for step in steps[:-1])


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────


def test_raw_prompt_is_continued_as_it_is(chat: Chat) -> None:
    prompt = render(chat, FRANCE)
    expected, plain = answer(chat, FRANCE, speculation=OFF)
    steps, finished = raw(chat, prompt=prompt, max_tokens=32)
    assert content_of(steps) == content_of(expected)
    assert finished.n_prompt_tokens == plain.n_prompt_tokens
    chat.engine.send(wire.Tokenize(query_id="t", text=prompt))
    tokenized = chat.engine.receive_until(wire.Tokenized)[-1]
    assert isinstance(tokenized, wire.Tokenized)
    steps, finished = raw(chat, prompt_tokens=tokenized.tokens, max_tokens=32)
    assert (content_of(steps), finished.n_prompt_tokens) == (content_of(expected), len(tokenized.tokens))
    assert finished.n_cached_tokens == len(tokenized.tokens) - 1


def test_raw_prompts_own_stop_and_grammar_count(chat: Chat) -> None:
    sampling = wire.Sampling(temperature=0, grammar='root ::= "yes" | "no"')
    chat.engine.send(wire.Generate(request_id="raw", prompt="Is it?", sampling=sampling))
    received = chat.engine.receive_until(wire.Finished)
    assert content_of([each for each in received if isinstance(each, wire.Step)]) in ("yes", "no")
    whole, _ = raw(chat, prompt="Once upon a time", max_tokens=24)
    stop = content_of(whole)[10:14]
    steps, finished = raw(chat, prompt="Once upon a time", max_tokens=24, stop=[stop])
    assert content_of(steps) == content_of(whole)[: content_of(whole).index(stop)]
    assert finished.stop_string == stop


def test_bad_raw_prompts_fail_alone(chat: Chat) -> None:
    for options in ({"prompt_tokens": [1, 1 << 24]}, {"prompt_tokens": []}, {"prompt": "a", "max_tokens": 0}):
        chat.engine.send(wire.Generate(request_id="raw", **options))  # type: ignore[arg-type]
        failed = chat.engine.receive_until(wire.Finished, wire.Failed)[-1]
        assert isinstance(failed, wire.Failed)
        assert failed.code == "invalid_value"
    chat.engine.send(wire.Generate(request_id="raw", prompt="word " * 5000))
    failed = chat.engine.receive_until(wire.Finished, wire.Failed)[-1]
    assert isinstance(failed, wire.Failed)
    assert (failed.code, failed.param) == ("context_length_exceeded", "prompt")
    assert content_of(answer(chat, FRANCE)[0])


def test_last_message_of_the_assistant_is_continued(chat: Chat) -> None:
    begun = "The capital of France is"
    messages = (FRANCE, ("assistant", begun))
    options = {"continue_final_message": True}
    assert render(chat, *messages, **options) == render(chat, FRANCE) + begun
    steps, finished = answer(chat, *messages, chat_options=options, max_tokens=4, speculation=OFF)
    expected, _ = raw(chat, prompt=render(chat, FRANCE) + begun, max_tokens=4)
    assert content_of(steps) == content_of(expected)
    assert "Paris" in content_of(steps)
    assert begun not in content_of(steps)
    assert finished.n_completion_tokens <= 4


# ── control tokens ──────────────────────────────────────────────────────────────────────────────


def test_control_tokens_are_no_text(chat: Chat) -> None:
    chat.engine.send(wire.Tokenize(query_id="t", text=START))
    tokenized = chat.engine.receive_until(wire.Tokenized)[-1]
    assert isinstance(tokenized, wire.Tokenized)
    (token,) = tokenized.tokens
    sampling = wire.Sampling(temperature=0, logit_bias={token: 100.0})
    steps, finished = answer(chat, FRANCE, max_tokens=3, sampling=sampling, n_top_logprobs=0)
    assert not content_of(steps)
    assert finished.n_completion_tokens == 3
    assert [each.piece.decode() for each in logprobs_of(steps)] == [START] * 3


@pytest.mark.parametrize("speculation", [OFF, FORCED], ids=["plain", "drafted"])
def test_ignored_end_never_comes(chat: Chat, speculation: wire.Speculation) -> None:
    _, finished = answer(chat, FRANCE, max_tokens=100, speculation=speculation)
    assert finished.reason == "stop"
    _, finished = answer(chat, FRANCE, max_tokens=100, speculation=speculation, ignore_eos=True)
    assert (finished.reason, finished.n_completion_tokens) == ("length", 100)


# ── tools ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("speculation", [OFF, FORCED], ids=["plain", "drafted"])
def test_required_call_is_made_and_matches_its_schema(qwen: Chat, speculation: wire.Speculation) -> None:
    steps, finished = answer(
        qwen,
        ("user", "How is the weather in Paris?"),
        chat_options={"tools": TOOLS, "tool_choice": "required", "enable_thinking": False},
        max_tokens=400,
        speculation=speculation,
    )
    assert finished.reason == "tool_calls"
    deltas = [delta for step in steps for delta in step.tool_calls]
    assert re.fullmatch("call_[A-Za-z0-9]{24}", deltas[0].id)
    assert (deltas[0].index, deltas[0].name) == (0, "get_weather")
    assert all((delta.index, delta.id, delta.name) == (0, "", "") for delta in deltas[1:])
    arguments = json.loads("".join(delta.arguments for delta in deltas))
    assert set(arguments) == {"city", "days"}
    assert arguments["days"] in (1, 2, 3)
    assert len(arguments["city"]) <= 12
    assert "<" not in content_of(steps)


def test_call_that_is_cut_off_ends_with_length(qwen: Chat) -> None:
    steps, finished = answer(
        qwen,
        FRANCE,
        chat_options={"tools": TOOLS, "tool_choice": "required", "enable_thinking": False},
        max_tokens=16,
    )
    assert (finished.reason, finished.n_completion_tokens) == ("length", 16)
    assert "tool_call" not in content_of(steps)


def test_tool_messages_and_calls_are_rendered(qwen: Chat) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 1}'},
    }
    messages = [
        {"role": "user", "content": "How is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It rains cats and dogs."},
    ]
    qwen.engine.send(
        wire.Generate(
            request_id="tools",
            messages_json=json.dumps(messages).encode(),
            chat_options_json=json.dumps({"tools": TOOLS, "enable_thinking": False}).encode(),
            sampling=GREEDY,
            max_tokens=8,
        )
    )
    received = qwen.engine.receive_until(wire.Finished, wire.Failed)
    assert isinstance(received[-1], wire.Finished), received[-1]
    query = wire.ApplyTemplate(
        query_id="a",
        messages_json=json.dumps(messages).encode(),
        chat_options_json=json.dumps({"tools": TOOLS}).encode(),
    )
    qwen.engine.send(query)
    rendered = qwen.engine.receive_until(wire.Rendered)[-1]
    assert isinstance(rendered, wire.Rendered)
    for part in ("The weather of a city.", "cats and dogs", '"days": 1', "<tool_response>"):
        assert part in rendered.prompt


# ── schemas and grammars ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fixture", ["chat", "qwen"])
@pytest.mark.parametrize("speculation", [OFF, FORCED], ids=["plain", "drafted"])
def test_content_matches_the_schema(
    request: pytest.FixtureRequest, fixture: str, speculation: wire.Speculation
) -> None:
    chat: Chat = request.getfixturevalue(fixture)
    steps, finished = answer(
        chat,
        FRANCE,
        chat_options={"json_schema": CITY, "enable_thinking": False},
        max_tokens=200,
        speculation=speculation,
    )
    value = json.loads(content_of(steps))
    assert set(value) == {"city", "days"}
    assert value["days"] in (1, 2, 3)
    assert finished.reason == "stop"


@pytest.mark.parametrize("fixture", ["chat", "qwen"])
def test_bad_schemas_are_refused_and_say_where(request: pytest.FixtureRequest, fixture: str) -> None:
    chat: Chat = request.getfixturevalue(fixture)
    bad = {"type": "object", "properties": {"shape": {"type": "round"}}, "required": ["shape"]}
    failed = refusal(chat, {"json_schema": bad})
    assert (failed.code, failed.param) == ("invalid_schema", "response_format")
    assert "shape" in failed.message
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    failed = refusal(chat, {"tools": [tool], "tool_choice": "required"})
    assert failed.code == "invalid_schema"
    assert failed.param is not None
    assert failed.param.startswith("tools")
    assert "shape" in failed.message
    assert content_of(answer(chat, FRANCE)[0])


def test_grammar_beside_tools_or_schema_is_refused(qwen: Chat) -> None:
    sampling = wire.Sampling(grammar='root ::= "yes"')
    for chat_options in ({"tools": TOOLS}, {"json_schema": CITY}):
        failed = refusal(qwen, chat_options, sampling=sampling)
        assert (failed.code, failed.param) == ("invalid_value", "grammar")
    steps, _ = answer(
        qwen,
        FRANCE,
        chat_options={"tools": TOOLS, "tool_choice": "none", "enable_thinking": False},
        sampling=sampling,
    )
    assert content_of(steps) == "yes"


# ── reasoning ───────────────────────────────────────────────────────────────────────────────────


def test_budget_used_up_while_thinking_is_length(tiny_model_path: Path) -> None:
    """The template opens the reasoning in the prompt."""
    engine = load(tiny_model_path, chat_template=(TEMPLATES / "Qwen-QwQ-32B.jinja").read_text())
    steps, finished = answer(Chat(engine), STORY, max_tokens=12, ignore_eos=True)
    assert content_of(steps) == ""
    assert "".join(step.reasoning for step in steps)
    assert (finished.reason, finished.n_reasoning_tokens, finished.n_completion_tokens) == ("length", 12, 12)
    whole = "".join(step.reasoning for step in steps)
    stop = whole[10:15]
    steps, finished = answer(Chat(engine), STORY, max_tokens=12, ignore_eos=True, stop=[stop])
    assert "".join(step.reasoning for step in steps) == whole[: whole.index(stop)]
    assert (finished.reason, finished.stop_string) == ("stop", stop)
    engine.close()
