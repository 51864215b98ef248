"""Anthropic Messages → chat."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from s2moe.server.convert.chat_form import ChatForm
from s2moe.server.convert.messages import BILLING_PREFIX, to_chat, without_billing
from s2moe.server.errors import InvalidRequestError, from_validation
from s2moe.server.schema.messages import CountTokensRequest, MessagesRequest

HI = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"größe": [1, None]}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}


def form_of(**fields: Any) -> ChatForm:
    return to_chat(MessagesRequest.model_validate({"messages": [HI], "max_tokens": 9, **fields}))


def messages_of(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    converted: list[dict[str, Any]] = form_of(messages=list(messages), **fields).fields["messages"]
    return converted


def error_of(**fields: Any) -> tuple[str | None, str]:
    """Param and message of the error that the request gives."""
    with pytest.raises((InvalidRequestError, ValidationError)) as caught:
        form_of(**fields).request()
    error = caught.value
    if isinstance(error, ValidationError):
        error = from_validation(error.errors())  # type: ignore[assignment]
    assert isinstance(error, InvalidRequestError)
    return error.param, error.message


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object", "properties": {}}, **fields}


def test_system_is_the_first_message_with_its_blocks_in_lines() -> None:
    assert messages_of(HI, system="be brief") == [{"role": "system", "content": "be brief"}, HI]
    blocks = [text("a", cache_control={"type": "ephemeral"}), text("b")]
    assert messages_of(HI, system=blocks)[0]["content"] == "a\nb"
    assert messages_of(HI, system=[]) == [HI]


def test_billing_line_does_not_reach_the_prompt() -> None:
    line = f"{BILLING_PREFIX}: cc_version=2.1; cch=0a1b2;"
    for system in (f"{line}\nYou help.", [text(line), text("You help.")], f"You help.\n{line}"):
        assert messages_of(HI, system=system)[0] == {"role": "system", "content": "You help."}
    assert messages_of(HI, system=line) == [HI]


@given(st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)))))
def test_all_other_lines_stay(lines: list[str]) -> None:
    kept = [line for line in lines if not line.startswith(BILLING_PREFIX)]
    billed = [part for line in kept for part in (f"{BILLING_PREFIX}: 1", line)]
    assert without_billing("\n".join(billed)) == "\n".join(kept)


def test_turns_keep_their_texts() -> None:
    converted = messages_of(user(text("What is"), text("it?")), assistant(text("This.")), HI)
    assert converted == [
        {"role": "user", "content": "What is\nit?"},
        {"role": "assistant", "content": "This."},
        HI,
    ]


def test_null_is_no_text() -> None:
    converted = messages_of({"role": "user", "content": None}, assistant(text("a")), HI)
    assert [message["content"] for message in converted] == ["", "a", "hi"]


def test_neighbours_of_one_role_are_one_message() -> None:
    converted = messages_of(HI, HI, assistant(text("a")), assistant(text("b")), HI)
    assert [message["content"] for message in converted] == ["hi\n\nhi", "a\n\nb", "hi"]


def test_thinking_and_tool_use_of_the_assistant() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    (_, message, result) = messages_of(HI, assistant(thinking, hidden, text("I look"), USE), user(RESULT))
    function = {"name": "look", "arguments": '{"größe":[1,null]}'}
    assert message == {
        "role": "assistant",
        "content": "I look",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
    }
    assert result == {"role": "tool", "tool_call_id": "toolu_1", "content": "seen"}


def test_results_come_before_what_the_user_says_besides() -> None:
    converted = messages_of(HI, assistant(USE), user(text("Here:"), RESULT, text("and?")))
    assert converted[2:] == [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "seen"},
        {"role": "user", "content": "Here:\nand?"},
    ]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": [text("a"), text("b")]}, "a\nb"),
        ({"content": None}, ""),
        ({"content": "not found", "is_error": True}, "Error: not found"),
        ({"content": "Error: not found", "is_error": True}, "Error: not found"),
        ({"content": "", "is_error": True}, "Error"),
        ({"content": "fine", "is_error": False}, "fine"),
    ],
)
def test_result_of_a_tool(fields: dict[str, Any], content: str) -> None:
    assert messages_of(HI, assistant(USE), user({**RESULT, **fields}))[2]["content"] == content


def test_numbers_of_any_size_survive() -> None:
    use = {**USE, "input": {"n": 2**70}}
    call = messages_of(HI, assistant(use), user(RESULT))[1]["tool_calls"][0]
    assert call["function"]["arguments"] == f'{{"n":{2**70}}}'


def test_fields_have_chats_names() -> None:
    body = form_of(
        temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["END"], metadata={"user_id": "x"}, model="m"
    ).request()
    assert (body.token_limit, body.temperature, body.top_p, body.top_k) == (9, 0.5, 0.9, 40)
    assert (body.stop_strings, body.model) == (["END"], "m")


@pytest.mark.parametrize(
    ("thinking", "enabled"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, None),
    ],
)
def test_thinking_is_off_unless_asked_for(thinking: Any, enabled: bool | None) -> None:
    assert form_of(thinking=thinking).request().enable_thinking is enabled


def test_tools_of_the_client_are_passed_on_and_others_are_skipped() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        tool("f", description="d"),
        {"type": "bash_20250124", "name": "bash"},
        tool("g", type="custom"),
    ]
    form = form_of(tools=tools)
    assert form.skipped_tools == ("web_search_20250305", "bash_20250124")
    body = form.request()
    assert body.tools is not None
    assert [each.function.name for each in body.tools] == ["f", "g"]
    assert body.tools[0].function.description == "d"
    assert body.tools[0].function.parameters == {"type": "object", "properties": {}}
    assert form.names.of("tools[1].function.parameters") == "tools[3].input_schema"


@pytest.mark.parametrize(
    ("choice", "chosen", "parallel"),
    [
        (None, None, True),
        ({"type": "auto"}, "auto", True),
        ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
    ],
)
def test_choice_of_tools(choice: Any, chosen: Any, parallel: bool) -> None:
    fields = form_of(tools=[tool("f")], tool_choice=choice).fields
    assert fields.get("tool_choice") == chosen
    assert fields["parallel_tool_calls"] is parallel


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_schema_of_the_answer(name: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    body = form_of(**{name: {"format": form} if name == "output_config" else form}).request()
    assert body.response_format is not None
    assert body.response_format.content_schema == {"type": "object"}


def test_counting_needs_no_limit() -> None:
    body = to_chat(CountTokensRequest.model_validate({"messages": [HI]})).request()
    assert body.token_limit is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [HI, user({"text": "x"})]}, "messages[1].content[0].type"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content"),
        ({"messages": [user({"type": "document", "source": {}})]}, "messages[0].content"),
        ({"messages": [user(USE)]}, "messages[0]"),
        ({"messages": [HI, assistant(RESULT)]}, "messages[1]"),
        ({"messages": [HI, assistant({**USE, "input": "x"})]}, "messages[1].content[0].input"),
        (
            {"messages": [HI, assistant({"type": "tool_use", "name": "f", "input": {}})]},
            "messages[1].content[0]",
        ),
        (
            {"messages": [HI, assistant(USE), user({**RESULT, "content": [{"type": "image"}]})]},
            "messages[2].content[0].content",
        ),
        ({"messages": [HI, assistant({**USE, "id": ""})]}, "messages[1].content[0]"),
        ({"system": 7}, "system"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"tools": [{"type": "bash_20250124"}, {"input_schema": {}}]}, "tools[1].name"),
        ({"tools": [{"type": "bash_20250124"}, tool("not a name")]}, "tools[1].name"),
        ({"tools": [tool("f") | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [tool("f") | {"input_schema": 7}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_config": {"format": {"type": "text", "schema": {}}}}, "output_config.format.type"),
    ],
)
def test_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    named, message = error_of(**fields)
    assert named == param
    assert f"`{param}`" in message


def test_effort_and_strict_tools_reach_the_chat_request() -> None:
    body = form_of(output_config={"effort": "high"}, tools=[tool("f", strict=True), tool("g")]).request()
    assert body.reasoning_effort == "high"
    assert [each.function.strict for each in body.tools or ()] == [True, None]
    assert form_of(tools=[tool("f")]).request().reasoning_effort is None


def test_image_is_refused_with_a_reason() -> None:
    for blocks in ([{"type": "image"}], [{**RESULT, "content": [{"type": "image"}]}]):
        _, message = error_of(messages=[HI, assistant(USE), user(*blocks)])
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
    ["messages", "system", "tools", "tool_choice", "thinking", "output_config", "metadata"]
)


@given(st.dictionaries(FIELDS, JSON, max_size=3))
def test_any_body_is_read_or_refused(fields: dict[str, Any]) -> None:
    # any other exception would be a 500
    with suppress(ValidationError, InvalidRequestError):
        form_of(**fields).request()
