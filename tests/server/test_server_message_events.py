"""Engine events → Anthropic's messages, streamed and whole: pure encoders, over arbitrary answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from answer_steps import answer_steps, calls_of
from event_order import check_message_events, named_events
from fake_engine import finished, started, step
from hypothesis import given
from hypothesis import strategies as st

from s2moe.engine.messages import Finished, Generate, PrefillProgress, Step, ToolCallDelta
from s2moe.server.convert.field_names import FieldNames
from s2moe.server.errors import QueueFullError, ServerError, to_reply
from s2moe.server.stream.message_answer import MessageBuilder, message_of
from s2moe.server.stream.message_events import MessageEventEncoder

REQUEST = Generate(request_id="r")


def encoder(names: FieldNames | None = None) -> MessageEventEncoder:
    return MessageEventEncoder(message_of("msg_1", "m"), names=names or FieldNames(), request_id="req-1")


def begin(made: MessageEventEncoder) -> bytes:
    data = made.start() + made.progress(started(REQUEST, prompt=10, cached=4))
    return data + made.progress(PrefillProgress(request_id="r", n_done_tokens=10))


def streamed(steps: list[Step], end: Finished) -> list[dict[str, Any]]:
    made = encoder()
    data = begin(made) + b"".join(made.feed(each) for each in steps)
    return named_events(data + made.finish_choice(end) + made.finish())


def whole(steps: list[Step], end: Finished) -> dict[str, Any]:
    builder = MessageBuilder(message_of("msg_1", "m"))
    for each in steps:
        builder.feed(each)
    builder.finish_choice(end)
    answer: dict[str, Any] = json.loads(msgspec.json.encode(builder.finish()))
    return answer


def object_of(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@given(answer_steps(), st.sampled_from(["stop", "length", "tool_calls"]))
def test_stream_and_whole_message_hold_the_same(steps: list[Step], reason: str) -> None:
    end = finished(REQUEST, reason, prompt=10, cached=4)
    message = check_message_events(streamed(steps, end))
    blocks = message["content"]
    calls = [
        (each["id"], each["name"], each["partial_json"]) for each in blocks if each["type"] == "tool_use"
    ]
    assert calls == calls_of(steps)
    for key, kind, name in (("content", "text", "text"), ("reasoning", "thinking", "thinking")):
        text = "".join(each[name] for each in blocks if each["type"] == kind)
        assert text == "".join(getattr(each, key) for each in steps)
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = object_of(block.pop("partial_json"))
    assert whole(steps, end) == message
    assert blocks


@given(answer_steps())
def test_failure_ends_a_stream_wherever_it_was(steps: list[Step]) -> None:
    made = encoder()
    data = begin(made) + b"".join(made.feed(each) for each in steps)
    data += made.fail(to_reply(ServerError("gone", code="engine_died")))
    assert check_message_events(named_events(data))["error"] == {"type": "api_error", "message": "gone"}


def test_failure_before_the_prompt_is_known_is_the_only_event() -> None:
    made = encoder()
    (event,) = named_events(made.start() + made.fail(to_reply(QueueFullError(4, 3))))
    assert event["type"] == "error"
    assert event["error"]["type"] == "rate_limit_error"
    assert event["request_id"] == "req-1"


@pytest.mark.parametrize(
    ("end", "stop"),
    [
        (finished(REQUEST, "stop"), ("end_turn", None)),
        (finished(REQUEST, "length"), ("max_tokens", None)),
        (finished(REQUEST, "tool_calls"), ("tool_use", None)),
        (
            msgspec.structs.replace(finished(REQUEST, "stop"), stop_string="END"),
            ("stop_sequence", "END"),
        ),
        (
            msgspec.structs.replace(finished(REQUEST, "tool_calls"), stop_string="END"),
            ("tool_use", None),
        ),
    ],
)
def test_stop_reason(end: Finished, stop: tuple[str, str | None]) -> None:
    for message in (whole([step(REQUEST, "a")], end), check_message_events(streamed([], end))):
        assert (message["stop_reason"], message["stop_sequence"]) == stop


def test_usage_counts_cached_tokens_apart() -> None:
    end = finished(REQUEST, prompt=10, cached=4, tokens=5)
    usage = {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 5,
    }
    assert whole([step(REQUEST, "a")], end)["usage"] == usage
    events = streamed([step(REQUEST, "a")], end)
    assert events[0]["message"]["usage"] == usage | {"output_tokens": 0}
    assert events[-2]["usage"] == usage


def test_thinking_is_signed_so_that_clients_keep_it() -> None:
    steps = [step(REQUEST, reasoning="hm"), step(REQUEST, "so")]
    for message in (
        whole(steps, finished(REQUEST)),
        check_message_events(streamed(steps, finished(REQUEST))),
    ):
        thinking, text = message["content"]
        assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "hm", "so")
        assert thinking["signature"]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"n": 1180591620717411303424}', {"n": 2**70}),
        ("", {}),
        ('{"a"', {}),
        ("[1]", {}),
    ],
)
def test_input_is_always_an_object(arguments: str, value: dict[str, Any]) -> None:
    call = ToolCallDelta(index=0, id="call_0", name="f", arguments=arguments)
    message = whole([Step(request_id="r", tool_calls=[call])], finished(REQUEST, "tool_calls"))
    assert message["content"] == [{"type": "tool_use", "id": "call_0", "name": "f", "input": value}]


def test_answer_of_nothing_has_an_empty_text() -> None:
    assert whole([], finished(REQUEST))["content"] == [{"type": "text", "text": ""}]
