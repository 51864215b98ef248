"""What requests of both protocols have in common on their way to a chat request."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2moe.server.convert.chat_form import ChatForm
from s2moe.server.convert.conversation import Conversation
from s2moe.server.convert.field_names import FieldNames, MessageOrigin
from s2moe.server.errors import InvalidRequestError, to_reply

NAMES = FieldNames(
    messages=[MessageOrigin("instructions"), MessageOrigin("input[0]", ["input[1]", "input[2]"])],
    tools=["tools[1]", "tools[4]"],
    fields={
        "messages": "input",
        "response_format": "text.format",
        "response_format.json_schema": "text.form",
    },
    tool_fields={"parameters": "input_schema"},
)


@pytest.mark.parametrize(
    ("param", "name"),
    [
        ("messages", "input"),
        ("messages[0]", "instructions"),
        ("messages[0].content", "instructions"),
        ("messages[1].tool_calls", "input[0]"),
        ("messages[1].tool_calls[1].function.arguments", "input[2]"),
        ("messages[1].tool_calls[7]", "input[0]"),
        ("messages[9].content", "input[9].content"),
        ("tools", "tools"),
        ("tools[1]", "tools[4]"),
        ("tools[1].function.name", "tools[4].name"),
        ("tools[0].function.parameters.properties.x", "tools[1].input_schema.properties.x"),
        ("tools[2].function.name", "tools[2].function.name"),
        ("response_format", "text.format"),
        ("response_format.type", "text.format.type"),
        ("response_format.json_schema.schema", "text.form.schema"),
        ("response_formats", "response_formats"),
        ("temperature", "temperature"),
    ],
)
def test_fields_have_the_names_of_the_client(param: str, name: str) -> None:
    assert NAMES.of(param) == name


@given(st.text(max_size=40))
def test_any_name_has_a_translation(param: str) -> None:
    assert isinstance(NAMES.of(param), str)


def test_message_of_an_error_is_translated_too() -> None:
    error = NAMES.translate(InvalidRequestError("`messages[0].content` is bad", param="messages[0].content"))
    assert (error.param, error.message) == ("instructions", "`instructions` is bad")
    reply = NAMES.translate_reply(to_reply(InvalidRequestError("`messages` is bad", param="messages")))
    assert (reply.error["param"], reply.error["message"]) == ("input", "`input` is bad")


def test_place_at_the_beginning_of_a_message_is_translated() -> None:
    error = NAMES.translate(InvalidRequestError("tools[1].function.parameters at #/x: bad"))
    assert (error.param, error.message) == (None, "tools[4].input_schema at #/x: bad")


def test_wrong_chat_request_names_the_field_of_the_client() -> None:
    form = ChatForm({"messages": [{"role": "user", "content": 7}]}, NAMES)
    with pytest.raises(InvalidRequestError) as caught:
        form.request()
    assert caught.value.param == "instructions"
    assert "`instructions`" in caught.value.message


PARTS = st.tuples(
    st.sampled_from(["system", "user", "reasoning", "answer", "call", "result"]), st.text("ab", min_size=1)
)


@given(st.lists(PARTS), st.booleans())
def test_conversation_keeps_every_text_in_its_order(parts: list[tuple[str, str]], merge: bool) -> None:
    conversation = Conversation(merge_users=merge)
    add: dict[str, Any] = {
        "system": conversation.add_system,
        "user": conversation.add_user,
        "reasoning": conversation.add_reasoning,
        "answer": conversation.add_answer,
        "call": lambda text, origin: conversation.add_call("id", "f", text, origin),
        "result": lambda text, origin: conversation.add_result("id", text, origin),
    }
    for index, (kind, text) in enumerate(parts):
        add[kind](text, f"[{index}]")
    messages = conversation.messages
    assert len(conversation.origins) == len(messages)
    roles = [message["role"] for message in messages]
    for role in ("system", "assistant", *(["user"] if merge else [])):
        assert all(pair != (role, role) for pair in pairwise(roles))
    for message, origin in zip(messages, conversation.origins, strict=True):
        kind, text = parts[int(origin.message[1:-1])]
        assert message["role"] == {"result": "tool"}.get(kind, kind if kind in roles else "assistant")
        assert text in str(message)
        assert len(origin.calls) == len(message.get("tool_calls", ()))
    kept = [
        (kind, each)
        for message in messages
        for kind, field in (("content", message["content"]), ("reasoning", message.get("reasoning_content")))
        if field is not None
        for each in field.split("\n\n")
    ]
    for kind, kinds in (("content", ("system", "user", "answer", "result")), ("reasoning", ("reasoning",))):
        assert [text for name, text in kept if name == kind] == [
            text for name, text in parts if name in kinds
        ]
    calls = [each["function"]["arguments"] for message in messages for each in message.get("tool_calls", ())]
    assert calls == [text for kind, text in parts if kind == "call"]
