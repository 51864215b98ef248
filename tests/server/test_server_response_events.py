"""Engine events → Responses, streamed and whole: pure encoders, over arbitrary answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from answer_steps import answer_steps, calls_of
from event_order import check_response_events, named_events
from fake_engine import finished, step
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from s2moe.engine.messages import Finished, Generate, Step, TokenLogprob, ToolCallDelta, TopLogprob
from s2moe.server.convert.field_names import FieldNames, MessageOrigin
from s2moe.server.errors import InvalidRequestError, ServerError, to_reply
from s2moe.server.schema.responses import ResponsesRequest
from s2moe.server.stream.response_events import ResponseEventEncoder
from s2moe.server.stream.response_object import ResponseBuilder, head_of

REQUEST = Generate(request_id="r")


def head(**fields: Any) -> dict[str, Any]:
    body = ResponsesRequest.model_validate({"input": "hi", **fields})
    return head_of(body, response_id="resp_1", created=7, model="m")


def encoder(*, summarize: bool = False, names: FieldNames | None = None) -> ResponseEventEncoder:
    return ResponseEventEncoder(head(), names=names or FieldNames(), summarize=summarize)


def streamed(steps: list[Step], end: Finished, *, summarize: bool = False) -> list[dict[str, Any]]:
    made = encoder(summarize=summarize)
    data = made.start() + b"".join(made.feed(each) for each in steps)
    return named_events(data + made.finish_choice(end) + made.finish())


def whole(steps: list[Step], end: Finished, *, summarize: bool = False) -> dict[str, Any]:
    builder = ResponseBuilder(head(), summarize=summarize)
    for each in steps:
        builder.feed(each)
    builder.finish_choice(end)
    answer: dict[str, Any] = json.loads(msgspec.json.encode(builder.finish()))
    return answer


@settings(deadline=None)  # OpenAI's models are built when they are first used
@given(answer_steps(), st.sampled_from(["stop", "length", "tool_calls"]), st.booleans())
def test_stream_and_whole_response_hold_the_same(steps: list[Step], reason: str, summarize: bool) -> None:
    end = finished(REQUEST, reason, reasoning_tokens=1)
    events = streamed(steps, end, summarize=summarize)
    response = check_response_events(events)
    assert response == whole(steps, end, summarize=summarize)
    output = response["output"]
    assert output
    calls = [
        (item["call_id"], item["name"], item["arguments"])
        for item in output
        if item["type"] == "function_call"
    ]
    assert calls == calls_of(steps)
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    assert "".join(texts) == "".join(each.content for each in steps)
    thoughts = [item for item in output if item["type"] == "reasoning"]
    assert "".join(item["content"][0]["text"] for item in thoughts) == "".join(
        each.reasoning for each in steps
    )
    assert all(bool(item["summary"]) is summarize for item in thoughts)
    assert all(item["content"][0]["text"] or item is output[0] for item in output if "content" in item)


def test_stream_and_whole_response_have_the_same_log_probabilities() -> None:
    def tokens(*pieces: str) -> list[TokenLogprob]:
        top = [TopLogprob(token=2, piece=b"x", logprob=-2.0)]
        return [TokenLogprob(token=1, piece=each.encode(), logprob=-1.0, top=top) for each in pieces]

    steps = [
        Step(request_id="r", reasoning="hm", logprobs=tokens("hm")),
        Step(request_id="r", content="So", logprobs=tokens("</think>", "So")),
        Step(request_id="r", content=" so", logprobs=tokens(" ", "so")),
    ]
    made = ResponseEventEncoder(head(), names=FieldNames(), summarize=False, logprobs=True)
    data = made.start() + b"".join(made.feed(each) for each in steps)
    events = named_events(data + made.finish_choice(finished(REQUEST)))
    response = check_response_events(events)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in delta] for delta in deltas] == [["So"], [" ", "so"]]
    assert response == whole(steps, finished(REQUEST))
    logprobs = response["output"][1]["content"][0]["logprobs"]
    assert logprobs == [each for delta in deltas for each in delta]
    top = {"token": "x", "bytes": list(b"x"), "logprob": -2.0}
    assert logprobs[0] == {"token": "So", "bytes": list(b"So"), "logprob": -1.0, "top_logprobs": [top]}


@settings(deadline=None)
@given(answer_steps(), st.booleans())
def test_failure_ends_a_stream_wherever_it_was(steps: list[Step], started: bool) -> None:
    made = encoder()
    data = made.start() if started else b""
    if started:
        data += b"".join(made.feed(each) for each in steps)
    events = named_events(data + made.fail(to_reply(ServerError("gone", code="engine_died"))))
    assert check_response_events(events)["error"] == {"code": "engine_died", "message": "gone"}
    assert events[-2] | {"sequence_number": 0} == {
        "type": "error",
        "sequence_number": 0,
        "code": "engine_died",
        "message": "gone",
        "param": None,
    }


def test_failure_names_the_field_of_the_client() -> None:
    names = FieldNames([MessageOrigin("instructions"), MessageOrigin("input[0]")])
    error = InvalidRequestError("`messages[1].content` is bad", param="messages[1].content")
    events = named_events(encoder(names=names).fail(to_reply(error)))
    assert (events[2]["param"], events[2]["message"]) == ("input[0]", "`input[0]` is bad")


def test_each_token_is_one_event_of_its_own_kind() -> None:
    call = ToolCallDelta(index=0, id="call_0", name="look")
    steps = [
        step(REQUEST, reasoning="hm"),
        step(REQUEST, reasoning="!"),
        step(REQUEST, "So"),
        step(REQUEST, " so"),
        Step(request_id="r", tool_calls=[call, ToolCallDelta(index=0, arguments='{"a"')]),
        Step(request_id="r", tool_calls=[ToolCallDelta(index=0, arguments=":1}")]),
    ]
    events = streamed(steps, finished(REQUEST, "tool_calls"))
    check_response_events(events)
    deltas = [(event["type"], event["delta"]) for event in events if "delta" in event]
    assert deltas == [
        ("response.reasoning_text.delta", "hm"),
        ("response.reasoning_text.delta", "!"),
        ("response.output_text.delta", "So"),
        ("response.output_text.delta", " so"),
        ("response.function_call_arguments.delta", '{"a"'),
        ("response.function_call_arguments.delta", ":1}"),
    ]


def test_calls_that_follow_each_other_are_items_of_their_own() -> None:
    calls = [ToolCallDelta(index=index, id=f"call_{index}", name="look") for index in range(3)]
    response = whole([Step(request_id="r", tool_calls=calls)], finished(REQUEST, "tool_calls"))
    assert [item["call_id"] for item in response["output"]] == ["call_0", "call_1", "call_2"]


def test_usage_counts_what_was_cached_and_thought() -> None:
    end = finished(REQUEST, prompt=10, cached=4, tokens=5, reasoning_tokens=3)
    response = whole([step(REQUEST, "a")], end)
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 15,
    }
    assert response["timings"]["predicted_per_second"] == 20.0


def test_answer_cut_while_thinking_is_incomplete_and_has_no_message() -> None:
    response = whole([step(REQUEST, reasoning="hm")], finished(REQUEST, "length"))
    assert response["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]


def test_head_gives_back_what_the_request_said() -> None:
    schema = {"type": "object", "properties": {"n": {"maximum": 2**70}}}
    tool = {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": True}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    fields: dict[str, Any] = {
        "instructions": "be brief",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "reasoning": {"effort": "low", "summary": "auto"},
        "tools": [tool, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": form},
        "parallel_tool_calls": False,
    }
    given_back: dict[str, Any] = json.loads(msgspec.json.encode(head(**fields)))
    assert given_back | fields | {"tools": [tool]} == given_back
    assert (given_back["store"], given_back["truncation"]) == (False, "disabled")
    Response.model_validate(given_back)


def test_head_shows_no_limit_where_there_is_none() -> None:
    assert [head(max_output_tokens=n)["max_output_tokens"] for n in (None, -1, 10**30, 9)] == [
        None,
        None,
        None,
        9,
    ]


@pytest.mark.parametrize("choice", [None, "auto", "none", "required"])
def test_head_says_the_choice_of_tools(choice: str | None) -> None:
    assert head(tool_choice=choice)["tool_choice"] == (choice or "auto")
