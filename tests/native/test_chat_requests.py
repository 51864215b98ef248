"""What s2moe_chat_apply() refuses, and what it makes of histories, tools and variables."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2moe.engine.native import ChatTemplate, Library, NativeError, Status

from chat_rig import TIME, USER, WEATHER, apply, template_text

QWEN3 = "Qwen-Qwen3-0.6B"


def history(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    return [
        *USER,
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages must not be empty"),
    "messages are no list": ({"messages": {}}, "messages must be a list"),
    "message is no object": ({"messages": [*USER, 5]}, "messages[1] must be an object with a role"),
    "no role": ({"messages": [{"content": "x"}]}, "messages[0] must be an object with a role"),
    "role is a number": ({"messages": [{"role": 5, "content": "x"}]}, "messages[0] must be an object"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0] must have content or tool_calls"),
    "content is a number": ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
    ),
    "no calls": (
        {"messages": [*USER, {"role": "assistant", "tool_calls": 5}]},
        "messages[1].tool_calls must be a list",
    ),
    "call without function": (
        {"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[1].tool_calls[0] must be a call of a function",
    ),
    "broken arguments": (
        {"messages": history("{")},
        "messages[1].tool_calls[0].function.arguments is not JSON",
    ),
    "deep arguments": (
        {"messages": history("[" * 5000 + "]" * 5000)},
        "messages[1].tool_calls[0].function.arguments is nested deeper",
    ),
    "tools are no list": ({"tools": {}}, "tools must be a list"),
    "tool is no object": ({"tools": ["get_weather"]}, 'tools[0] must be {"type": "function"'),
    "other kind of tool": ({"tools": [{"type": "web_search"}]}, "tools[0] must be"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name must be"),
    "empty name": ({"tools": [named("")]}, "tools[0].function.name must be"),
    "name is a number": ({"tools": [named(5)]}, "tools[0].function.name must be"),
    "long name": ({"tools": [named("x" * 200)]}, "tools[0].function.name must be"),
    "name with a quote": ({"tools": [named('a"b')]}, "tools[0].function.name must be"),
    "same name twice": ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name is that of another"),
    "description is a list": (
        {"tools": [{"type": "function", "function": {"name": "f", "description": []}}]},
        "tools[0].function.description must be a string",
    ),
    "parameters of an array": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters must be a schema of an object",
    ),
    "many tools": ({"tools": [named(f"f{i}") for i in range(600)]}, "tools must be at most"),
    "tool_choice": ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice must be auto, none or"),
    "tool_choice is an object": ({"tools": [WEATHER], "tool_choice": {}}, "tool_choice must be auto"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice must not be required"),
    "required with a schema": (
        {"tools": [WEATHER], "tool_choice": "required", "json_schema": {}},
        "json_schema cannot apply",
    ),
    "parallel_tool_calls": ({"parallel_tool_calls": "yes"}, "parallel_tool_calls must be true or false"),
    "enable_thinking": ({"enable_thinking": 1}, "enable_thinking must be true or false"),
    "kwargs": ({"chat_template_kwargs": []}, "chat_template_kwargs must be an object"),
    "kwargs messages": (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages is set by the server",
    ),
    "continue the user": ({"continue_final_message": True}, "continue_final_message needs a last message"),
    "continue a call": (
        {"messages": history("{}")[:2], "continue_final_message": True},
        "continue_final_message cannot continue",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_request_is_refused_by_its_place(library: Library, name: str) -> None:
    request, message = REFUSED[name]
    with pytest.raises(NativeError) as caught:
        apply(library, template_text(QWEN3), **request)
    assert caught.value.status == Status.INVALID
    assert caught.value.message.startswith(message)
    assert len(caught.value.message) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYWORDS = [
    *("type", "properties", "required", "items", "prefixItems", "anyOf", "oneOf", "allOf", "enum", "const"),
    *("pattern", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum"),
    *("format", "not", "additionalProperties", "$ref", "$defs", "uniqueItems", "title"),
]
TYPES = ["object", "array", "string", "integer", "number", "boolean", "null"]
SCHEMAS = st.recursive(
    st.fixed_dictionaries({}, optional={"type": st.sampled_from(TYPES)}),
    lambda inner: (
        st.dictionaries(st.sampled_from(KEYWORDS), inner | JSON, max_size=4)
        | st.fixed_dictionaries({"properties": st.dictionaries(st.text(max_size=4), inner, max_size=3)})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)})
        | st.fixed_dictionaries({"items": inner, "minItems": st.integers(-2, 3000)})
        | st.fixed_dictionaries(
            {"type": st.just("string"), "pattern": st.text('ab^$.*+?()[]{}|\\d"1,-', max_size=12)}
        )
        | st.fixed_dictionaries(
            {"$ref": st.sampled_from(["#", "#/", "#/$defs/a", "#/properties/a", "#/items", "#/anyOf/0"])}
        )
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "messages": JSON
            | st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), JSON)),
            "tools": JSON
            | st.lists(
                st.fixed_dictionaries(
                    {"function": st.fixed_dictionaries({"name": st.text(max_size=3), "parameters": SCHEMAS})}
                ),
                max_size=2,
            ),
            "json_schema": SCHEMAS | JSON,
            "tool_choice": JSON | st.sampled_from(["auto", "none", "required"]),
            "chat_template_kwargs": JSON,
            "enable_thinking": JSON,
            "continue_final_message": JSON,
        },
    )
)
def test_any_request_is_answered_or_refused(request: dict[str, Any]) -> None:
    """Nothing ends the process, whatever the JSON says."""
    library = Library()
    status, text = Status.OK, ""
    try:
        text = json.loads(apply(library, template_text(QWEN3), **({"messages": USER} | request)))["prompt"]
    except NativeError as error:
        status, text = error.status, error.message
    assert text
    assert status in (Status.OK, Status.INVALID, Status.GRAMMAR, Status.TEMPLATE, Status.UNSUPPORTED)


@settings(deadline=None)
@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda data: data.decode("latin-1")))
def test_any_text_is_refused(text: str) -> None:
    library = Library()
    chat = ChatTemplate(library, None, template_text("olmoe"))
    try:
        with pytest.raises(NativeError):
            chat.apply(text.replace("\0", "").encode())
    finally:
        chat.close()


def test_source_is_the_template_in_use(library: Library) -> None:
    chat = ChatTemplate(library, None, template_text("olmoe"))
    assert chat.source() == template_text("olmoe").rstrip("\n")  # Jinja drops it
    chat.close()


def test_empty_arguments_of_a_history_are_an_empty_object(library: Library) -> None:
    for arguments in ("", " ", None):
        chat = json.loads(apply(library, template_text(QWEN3), messages=history(arguments), tools=[WEATHER]))
        assert '"arguments": {}' in chat["prompt"]


def test_nulls_count_as_absent(library: Library) -> None:
    options = dict.fromkeys(
        (
            "tools",
            "tool_choice",
            "json_schema",
            "enable_thinking",
            "chat_template_kwargs",
            "parallel_tool_calls",
        )
    )
    messages = [
        {"role": "user", "content": "Hello", "name": None, "tool_calls": None, "reasoning_content": None}
    ]
    assert apply(library, template_text(QWEN3), messages=messages, **options) == apply(
        library, template_text(QWEN3)
    )


def test_thinking_is_turned_off_by_either_way(library: Library) -> None:
    empty = "<think>\n\n</think>\n\n"
    source = template_text(QWEN3)
    assert empty not in json.loads(apply(library, source))["prompt"]
    assert json.loads(apply(library, source, enable_thinking=False))["prompt"].endswith(empty)
    kwargs = {"enable_thinking": False}
    chat = json.loads(apply(library, source, enable_thinking=True, chat_template_kwargs=kwargs))
    assert chat["prompt"].endswith(empty), "variables of the template win"
    v31 = template_text("deepseek-ai-DeepSeek-V3.1")
    assert json.loads(apply(library, v31, enable_thinking=True))["prompt"].endswith("<think>")
    assert json.loads(apply(library, v31, enable_thinking=False))["prompt"].endswith("</think>")


def test_variables_reach_the_template(library: Library) -> None:
    source = "{{ greeting }} {{ numbers | join('-') }} {{ messages[0].content }}"
    kwargs = {"greeting": "Salut", "numbers": [1, 2], "_unused": {"a": None}}
    assert json.loads(apply(library, source, chat_template_kwargs=kwargs))["prompt"] == "Salut 1-2 Hello"


def test_reasoning_effort_reaches_gpt_oss(library: Library) -> None:
    source = template_text("openai-gpt-oss-120b")
    chat = json.loads(apply(library, source, chat_template_kwargs={"reasoning_effort": "high"}))
    assert "Reasoning: high" in chat["prompt"]


def test_content_as_parts(library: Library) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    chat = json.loads(apply(library, template_text(QWEN3), messages=[{"role": "user", "content": parts}]))
    assert "Hello\nthere" in chat["prompt"]


def test_tools_are_described_to_templates_that_do_not(library: Library) -> None:
    """OLMoE and DeepSeek-V2 in a system message; Mixtral, which has none, in the first message."""
    for name in ("olmoe", "deepseek-v2", "mixtral"):
        system = [{"role": "system", "content": "Be brief."}, *USER]
        prompt = json.loads(apply(library, template_text(name), messages=system, tools=[WEATHER, TIME]))[
            "prompt"
        ]
        assert prompt.index("Be brief.") < prompt.index("get_weather_time") < prompt.index("Hello")
        assert prompt.count("<tool_call>") == 1


def test_content_only_needs_no_parser(library: Library) -> None:
    for name in ("olmoe", "mixtral", "deepseek-v2"):
        assert json.loads(apply(library, template_text(name)))["format"] == "content-only"
        assert json.loads(apply(library, template_text(name), tools=[TIME]))["format"] != "content-only"
    assert json.loads(apply(library, template_text(QWEN3)))["format"] != "content-only"
