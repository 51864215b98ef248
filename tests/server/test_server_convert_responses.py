"""OpenAI Responses → chat."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from s2moe.server.convert.chat_form import ChatForm
from s2moe.server.convert.responses import to_chat
from s2moe.server.errors import InvalidRequestError, from_validation
from s2moe.server.schema.responses import ResponsesRequest


def form_of(**fields: Any) -> ChatForm:
    return to_chat(ResponsesRequest.model_validate({"input": "hi", **fields}))


def messages_of(items: Any, **fields: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = form_of(input=items, **fields).fields["messages"]
    return messages


def error_of(**fields: Any) -> tuple[str | None, str]:
    """Param and message of the error that the request gives."""
    with pytest.raises((InvalidRequestError, ValidationError)) as caught:
        form_of(**fields).request()
    error = caught.value
    if isinstance(error, ValidationError):
        error = from_validation(error.errors())  # type: ignore[assignment]
    assert isinstance(error, InvalidRequestError)
    return error.param, error.message


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, **fields}


CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"a":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "seen"}
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}


def test_text_is_a_message_of_the_user() -> None:
    assert messages_of("hi") == [{"role": "user", "content": "hi"}]


def test_instructions_and_leading_system_messages_are_one_message() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "system", "content": "c"},
        {"role": "user", "content": "hi"},
    ]
    assert messages_of(items, instructions="a") == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        {"role": "user", "content": "hi"},
    ]


def test_parts_are_joined() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages_of([{"role": "user", "content": parts}])[0]["content"] == "ab"


def test_output_of_an_answer_becomes_one_message_again() -> None:
    items = [
        {"role": "user", "content": "where?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look", "annotations": [], "logprobs": []}],
        },
        {**CALL, "id": "fc_1", "status": "completed"},
        OUTPUT,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    assert messages_of(items)[1:] == [
        {"role": "assistant", "content": "I look", "reasoning_content": "hm", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
        {"role": "assistant", "content": "no"},
    ]


def test_summary_stands_in_for_reasoning_and_what_is_encrypted_is_dropped() -> None:
    summary = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    items = [
        {"type": "reasoning", "summary": summary},
        CALL,
        OUTPUT,
        {"type": "reasoning", "summary": [], "encrypted_content": "xyz"},
        {"role": "user", "content": "and?"},
    ]
    messages = messages_of(items)
    assert messages[0]["reasoning_content"] == "a\nb"
    assert [message["role"] for message in messages] == ["assistant", "tool", "user"]


def test_neighbouring_messages_of_the_user_stay_apart_as_in_chat() -> None:
    assert len(messages_of([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])) == 2


def test_null_is_no_text() -> None:
    user = {"role": "user", "content": None}
    assert messages_of([user, CALL, {**OUTPUT, "output": None}])[0]["content"] == ""
    assert messages_of([user, CALL, {**OUTPUT, "output": None}])[2]["content"] == ""
    for item in ({"role": "user"}, {"type": "function_call_output", "call_id": "call_1"}):
        with pytest.raises(ValidationError, match="needs"):
            messages_of([CALL, item])


def test_output_of_a_function_may_have_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages_of([CALL, {**OUTPUT, "output": parts}])[1]["content"] == "ab"


def test_fields_have_chats_names() -> None:
    schema = {"type": "object"}
    body = form_of(
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["x"],
        logit_bias={"7": 1.5},
        reasoning={"effort": "low"},
        text={
            "format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True},
            "verbosity": "low",
        },
        s2moe={"preset": "exact"},
        model="m",
    ).request()
    assert (body.token_limit, body.temperature, body.top_p, body.seed) == (5, 0.5, 0.9, 3)
    assert (body.stop_strings, body.logit_bias, body.reasoning_effort) == (["x"], {7: 1.5}, "low")
    assert body.response_format is not None
    assert body.response_format.content_schema == schema
    assert body.s2moe is not None
    assert (body.s2moe.preset, body.model) == ("exact", "m")


@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_formats_without_a_schema(kind: str) -> None:
    form = form_of(text={"format": {"type": kind}}).request().response_format
    assert form is not None
    assert form.type == kind


def test_functions_are_passed_on_and_other_tools_are_skipped() -> None:
    tools = [
        {"type": "web_search", "filters": 7},
        function("f", description="d", strict=True),
        {"type": "custom", "name": 5, "parameters": "none"},
        {"type": "web_search"},
        function("g"),
    ]
    form = form_of(tools=tools, parallel_tool_calls=False)
    assert form.skipped_tools == ("web_search", "custom")
    body = form.request()
    assert body.tools is not None
    assert [tool.function.name for tool in body.tools] == ["f", "g"]
    assert (body.tools[0].function.description, body.tools[0].function.strict) == ("d", True)
    assert body.parallel_tool_calls is False
    assert form.names.of("tools[1].function.parameters") == "tools[4].parameters"


def test_choice_of_tools() -> None:
    tools = [function("f"), function("g")]
    for choice in ("auto", "none", "required"):
        assert form_of(tools=tools, tool_choice=choice).request().tool_choice == choice
    named = form_of(tools=tools, tool_choice={"type": "function", "name": "g"}).fields
    assert named["tool_choice"] == {"type": "function", "function": {"name": "g"}}
    allowed = [{"type": "function", "name": "g"}, {"type": "mcp", "name": ["f"]}, {"type": "function"}]
    some = form_of(tools=tools, tool_choice={"type": "allowed_tools", "mode": "required", "tools": allowed})
    assert [tool["function"]["name"] for tool in some.fields["tools"]] == ["g"]
    assert some.fields["tool_choice"] == "required"


def test_choice_that_wants_no_call_needs_no_tools() -> None:
    for choice in ("auto", "none"):
        assert form_of(tool_choice=choice).request().tool_choice is None
    assert form_of(tools=[{"type": "web_search"}], tool_choice="auto").request().tools is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user"}]}, "input[1]"),
        ({"input": [{"content": "a"}]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": {}, "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["a"]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": {"a": 1}}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0]"),
        ({"input": [{**CALL, "arguments": {"a": 1}}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": "a"}, {**CALL, "arguments": "{"}, OUTPUT]}, "input[1]"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "call_1"}]}, "input[1]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "immense"}}, "reasoning.effort"),
        ({"reasoning": "low"}, "reasoning"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 7}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "mcp"}, function("not a name")]}, "tools[1].name"),
        (
            {"tools": [{"type": "mcp"}, function("f") | {"parameters": {"type": "string"}}]},
            "tools[1].parameters",
        ),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"temperature": 9}, "temperature"),
        ({"truncation": "some"}, "truncation"),
    ],
)
def test_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    named, message = error_of(**fields)
    assert named == param
    assert f"`{param}`" in message or "required" in message


def test_image_is_refused_with_a_reason() -> None:
    _, message = error_of(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}])
    assert "images are not supported" in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "input"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "input",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "metadata",
        "include",
        "conversation",
        "instructions",
    ]
)


@given(st.dictionaries(FIELDS, JSON, max_size=3))
def test_any_body_is_read_or_refused(fields: dict[str, Any]) -> None:
    # any other exception would be a 500
    with suppress(ValidationError, InvalidRequestError):
        form_of(**fields).request()
