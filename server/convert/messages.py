"""Anthropic Messages → chat."""

from __future__ import annotations

import json
from typing import Any, Final

from s2moe.server.convert.chat_form import ChatForm, sampling_of
from s2moe.server.convert.conversation import Conversation
from s2moe.server.convert.field_names import FieldNames
from s2moe.server.schema.messages import (
    BLOCK_SEPARATOR,
    CUSTOM,
    CountTokensRequest,
    MessageBlock,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    MessageTurn,
    Thinking,
)

BILLING_PREFIX: Final = "x-anthropic-billing-header"
"""Of a line that Claude Code puts first into its system prompt, and that differs from turn to turn."""
_FIELDS: Final = {
    "max_completion_tokens": "max_tokens",
    "enable_thinking": "thinking",
    "reasoning_effort": "output_config.effort",
    "tool_choice.function": "tool_choice",
}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: CountTokensRequest) -> ChatForm:
    """The same request for the chat endpoint; tools that the client does not run are left out."""
    conversation = Conversation(merge_users=True)
    if system := without_billing(body.system or ""):
        conversation.add_system(system, "system")
    for index, turn in enumerate(body.messages):
        _add(conversation, turn, f"messages[{index}]")
    tools = [tool for tool in body.tools or () if _is_custom(tool)]
    fields: dict[str, Any] = {
        **sampling_of(body),
        "model": body.model,
        "messages": conversation.messages,
        "tools": [_chat_tool(tool) for tool in tools] or None,
        "enable_thinking": _enable_thinking(body.thinking),
        "reasoning_effort": body.output_config.effort if body.output_config else None,
    }
    choice = body.tool_choice
    if choice is not None and (tools or choice.type in ("any", "tool")):
        fields["tool_choice"] = _chat_choice(choice)
    if tools:
        fields["parallel_tool_calls"] = not (choice is not None and choice.disable_parallel_tool_use)
    names = dict(_FIELDS)
    if body.answer_format is not None:
        name, form = body.answer_format
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        names |= {
            "response_format": name,
            "response_format.json_schema": name,
            "json_schema": f"{name}.schema",
        }
    if isinstance(body, MessagesRequest):
        fields["max_completion_tokens"] = body.max_tokens
        if body.stop_sequences is not None:
            fields["stop"] = body.stop_sequences
            names["stop"] = "stop_sequences"
    places = [f"tools[{index}]" for index, tool in enumerate(body.tools or ()) if _is_custom(tool)]
    skipped = tuple(dict.fromkeys(tool.type or "" for tool in body.tools or () if not _is_custom(tool)))
    renamed = FieldNames(conversation.origins, places, names, {"parameters": "input_schema"})
    return ChatForm(fields, renamed, skipped)


def without_billing(text: str) -> str:
    """The text without the lines that would make each prompt differ from the one before at its beginning."""
    if BILLING_PREFIX not in text:
        return text
    lines = text.split("\n")
    return "\n".join(line for line in lines if not line.startswith(BILLING_PREFIX))


def _add(conversation: Conversation, turn: MessageTurn, origin: str) -> None:
    texts = [block.text or "" for block in turn.content if block.type == "text"]
    text = BLOCK_SEPARATOR.join(texts)
    if turn.role == "system":
        if text := without_billing(text):
            conversation.add_system(text, origin)
    elif turn.role == "user":
        # Results first: they belong to the calls of the message before, whatever the user says besides.
        has_results = False
        for index, block in enumerate(turn.content):
            if block.type == "tool_result":
                has_results = True
                place = f"{origin}.content[{index}]"
                conversation.add_result(block.tool_use_id or "", _result_text(block), place)
        if texts or not has_results:
            conversation.add_user(text, origin)
    else:
        _add_answer(conversation, turn, text if texts else None, origin)


def _add_answer(conversation: Conversation, turn: MessageTurn, text: str | None, origin: str) -> None:
    thoughts = [block.thinking for block in turn.content if block.type == "thinking" and block.thinking]
    if thoughts:
        conversation.add_reasoning(BLOCK_SEPARATOR.join(thoughts), origin)
    if text is not None:
        conversation.add_answer(text, origin)
    for index, block in enumerate(turn.content):
        if block.type == "tool_use":
            # not msgspec, which has no whole numbers beyond 64 bits
            arguments = json.dumps(block.input, ensure_ascii=False, separators=(",", ":"))
            place = f"{origin}.content[{index}]"
            conversation.add_call(block.id or "", block.name or "", arguments, place)


def _result_text(block: MessageBlock) -> str:
    """Chat has no word for a tool that failed, so the text says it."""
    text = block.content or ""
    if not block.is_error or text.startswith("Error"):
        return text
    return f"Error: {text}" if text else "Error"


def _enable_thinking(thinking: Thinking | None) -> bool | None:
    """None = as the template does by itself."""
    if thinking is not None and thinking.type == "adaptive":
        return None
    return thinking is not None and thinking.type == "enabled"


def _is_custom(tool: MessagesTool) -> bool:
    return tool.type in (None, CUSTOM)


def _chat_tool(tool: MessagesTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _chat_choice(choice: MessagesToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]
