"""OpenAI Responses → chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from s2moe.server.convert.chat_form import ChatForm, sampling_of
from s2moe.server.convert.conversation import Conversation
from s2moe.server.convert.field_names import FieldNames
from s2moe.server.schema.responses import FUNCTION, InputItem, ResponsesRequest, ResponsesTool, TextFormat

_FIELDS: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "json_schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
}


def to_chat(body: ResponsesRequest) -> ChatForm:
    """The same request for the chat endpoint; tools that are no functions are left out."""
    conversation = Conversation(merge_users=False)
    if body.instructions:
        conversation.add_system(body.instructions, "instructions")
    for index, item in enumerate(body.input):
        _add(conversation, item, f"input[{index}]")
    tools, names = _functions(body)
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = _named(choice) if choice["type"] == FUNCTION else choice["mode"]
    if not tools and choice in ("auto", "none"):
        choice = None
    fields = {
        **sampling_of(body),
        "model": body.model,
        "messages": conversation.messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_chat_tool(tool) for tool in tools] or None,
        "tool_choice": choice,
        "parallel_tool_calls": (body.parallel_tool_calls is not False) if tools else None,
        "response_format": _chat_format(body.text.format) if body.text and body.text.format else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "logprobs": True if body.wants_logprobs else None,
        "top_logprobs": body.top_logprobs,
    }
    skipped = tuple(dict.fromkeys(tool.type for tool in body.tools or () if tool.type != FUNCTION))
    return ChatForm(fields, FieldNames(conversation.origins, names, _FIELDS), skipped)


def _add(conversation: Conversation, item: InputItem, origin: str) -> None:
    match item.type:
        case "message":
            text = item.content or ""
            if item.role == "assistant":
                conversation.add_answer(text, origin)
            elif item.role == "user":
                conversation.add_user(text, origin)
            else:
                conversation.add_system(text, origin)
        case "reasoning":
            # one that has nothing but encrypted content is another server's
            if thoughts := item.content or item.summary:
                conversation.add_reasoning(thoughts, origin)
        case "function_call":
            conversation.add_call(item.call_id or "", item.name or "", item.arguments or "", origin)
        case "function_call_output":
            conversation.add_result(item.call_id or "", item.output or "", origin)


def _functions(body: ResponsesRequest) -> tuple[list[ResponsesTool], list[str]]:
    """The functions that may be called, each with its place in the request."""
    allowed: set[str] | None = None
    if isinstance(body.tool_choice, dict) and body.tool_choice["type"] == "allowed_tools":
        allowed = set(names_of(body.tool_choice["tools"]))
    tools: list[ResponsesTool] = []
    names: list[str] = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type == FUNCTION and (allowed is None or tool.name in allowed):
            tools.append(tool)
            names.append(f"tools[{index}]")
    return tools, names


def names_of(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the functions among the tools of a choice of `allowed_tools`."""
    return [str(tool["name"]) for tool in tools if tool.get("type") == FUNCTION and tool.get("name")]


def _chat_tool(tool: ResponsesTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": FUNCTION, "function": {**function, "strict": tool.strict}}


def _named(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": FUNCTION, "function": {"name": choice["name"]}}


def _chat_format(form: TextFormat) -> dict[str, Any]:
    if form.schema_ is None or form.type == "json_object":
        return {"type": form.type, "schema": form.schema_}
    schema = {
        "name": form.name,
        "description": form.description,
        "schema": form.schema_,
        "strict": form.strict,
    }
    return {"type": form.type, "json_schema": schema}
