"""Chat request → the engine's requests: what cannot be said of one field alone is checked here.

All endpoints that speak of messages come through here, whatever their own protocol is.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from s2moe.engine.messages import Generate, ModelInfo
from s2moe.server.answering import Answering, Job
from s2moe.server.completion_job import check_generates, seeded
from s2moe.server.errors import ContextLengthError, InvalidRequestError, NotFoundError
from s2moe.server.schema.chat import ChatRequest
from s2moe.server.schema.chat_message import ChatMessage
from s2moe.server.schema.json_value import MAX_SCHEMA_BYTES
from s2moe.server.schema.tools import NamedToolChoice, Tool

_log = logging.getLogger(__name__)


def chat_job(answering: Answering, body: ChatRequest, api: str) -> Job:
    """What the engine is asked for: one Generate per choice. `api` is the label of the metrics.

    Raises ApiError with the `param` at fault, as the chat endpoint names it; the caller accounts for it with
    `answering.refuse()`.
    """
    check_model(answering, body.model)
    messages_json, options_json = chat_wire(answering, body)
    if answering.settings.log_prompts:
        _log.info("chat request", extra={"fields": {"messages": json.loads(messages_json)}})
    request = Generate(
        request_id="",
        messages_json=messages_json,
        chat_options_json=options_json,
        sampling=body.to_sampling(),
        max_tokens=body.token_limit,
        stop=body.stop_strings,
        speculation=body.to_speculation(),
        n_top_logprobs=_n_top_logprobs(body),
        ignore_eos=bool(body.ignore_eos),
    )
    # The ids are ours, not the client's, so that they are unique.
    return Job(
        api,
        [
            msgspec.structs.replace(
                request,
                request_id=uuid.uuid4().hex,
                sampling=seeded(request.sampling, index),
                own_call_ids=index > 0,
            )
            for index in range(body.n_choices)
        ],
    )


def chat_wire(answering: Answering, body: ChatRequest) -> tuple[bytes, bytes]:
    """`messages_json` and `chat_options_json` of Generate and ApplyTemplate. Raises ApiError."""
    model = answering.client.model
    check_generates(model)
    tools = offered_tools(body)
    check_fit(body.messages, tools, model)
    messages = _wire_messages(body.messages)
    options = _tool_options(body, tools)
    options |= _format_options(body, tools)
    options |= _thinking_options(body)
    options |= _continuation_options(body)
    if "continue_final_message" in options and _is_empty(body.messages[-1]):
        # llama.cpp would leave out its role, too, and the model write one.
        if len(messages) == 1:
            raise _invalid("messages", "an empty message of the assistant alone is nothing to go on from")
        messages.pop()
        del options["continue_final_message"]
    return msgspec.json.encode(messages), _encode(options, "chat_template_kwargs")


def check_model(answering: Answering, model: str | None) -> None:
    """Raises NotFoundError where only the served model's name is allowed."""
    if answering.settings.strict_model and model is not None and model != answering.alias:
        raise NotFoundError(
            f"The model `{model[:64]}` is not served here; this server has `{answering.alias}`.",
            code="model_not_found",
            param="model",
        )


def check_fit(messages: Sequence[ChatMessage], tools: Sequence[Tool], model: ModelInfo | None) -> None:
    """Raises ContextLengthError for a prompt that does not fit the context even in the longest tokens. The
    engine would say the same, but until then it would take memory in the queue."""
    if model is None or not model.longest_piece_bytes:
        return
    n_bytes = sum(message.n_text_bytes for message in messages)
    n_bytes += sum(len(_encode(tool.to_wire(), "tools")) for tool in tools)
    n_tokens = n_bytes // model.longest_piece_bytes
    if n_tokens < model.n_ctx:
        return
    what = "the messages and tools have at least" if tools else "the messages have at least"
    raise ContextLengthError(what, n_tokens=n_tokens, n_ctx=model.n_ctx, param="messages")


def offered_tools(body: ChatRequest) -> list[Tool]:
    """The tools that the model gets to see. With the choice `none` there are none: a model that is shown
    tools may call them all the same, and the call would be text of the answer.

    Raises InvalidRequestError.
    """
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            param = f"tools[{index}].function.name"
            raise _invalid(param, f"there is another tool `{name}`")
    if choice == "none":
        return []
    if isinstance(choice, NamedToolChoice):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            name = choice.function.name[:64]
            raise _invalid("tool_choice", f"there is no tool `{name}` among `tools`")
        return chosen
    if choice == "required" and not tools:
        raise _invalid("tool_choice", "`required` needs `tools`")
    return tools


def _tool_options(body: ChatRequest, tools: Sequence[Tool]) -> dict[str, Any]:
    if not tools:
        return {}
    is_required = body.tool_choice == "required" or isinstance(body.tool_choice, NamedToolChoice)
    for index, tool in enumerate(tools):
        param = f"tools[{index}].function.parameters"
        _check_schema_size(tool.function.parameters, param)
    return {
        "tools": [tool.to_wire() for tool in tools],
        "tool_choice": "required" if is_required else "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }


def _format_options(body: ChatRequest, tools: Sequence[Tool]) -> dict[str, Any]:
    schema = None if body.response_format is None else body.response_format.content_schema
    if body.grammar and (tools or schema is not None):
        other = "tools" if tools else "response_format"
        raise _invalid("grammar", f"a grammar cannot be combined with `{other}`; leave one of them out")
    if schema is None:
        return {}
    if tools and body.tool_choice not in (None, "auto"):
        reason = "an answer that has to be a tool call has no content to format; leave out one of them"
        raise _invalid("response_format", reason)
    _check_schema_size(schema, "response_format")
    is_strict = body.response_format is not None and body.response_format.is_strict
    return {"json_schema": schema, "strict_schema": True} if is_strict else {"json_schema": schema}


def _thinking_options(body: ChatRequest) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    variables |= body.chat_template_kwargs or {}
    options: dict[str, Any] = {"chat_template_kwargs": variables} if variables else {}
    if body.enable_thinking is not None:
        options["enable_thinking"] = body.enable_thinking
    elif body.reasoning_effort == "none":
        options["enable_thinking"] = False
    return options


def _continuation_options(body: ChatRequest) -> dict[str, Any]:
    last = body.messages[-1]
    is_assistant = last.role == "assistant"
    wanted = body.continue_final_message
    if wanted and body.add_generation_prompt:
        raise _invalid("continue_final_message", "it contradicts `add_generation_prompt`; set one of them")
    if wanted and not is_assistant:
        raise _invalid("continue_final_message", "the last message is not the assistant's")
    if wanted is None:
        wanted = is_assistant and not body.add_generation_prompt
    if not wanted:
        return {"add_generation_prompt": False} if body.add_generation_prompt is False else {}
    if last.tool_calls:
        param = f"messages[{len(body.messages) - 1}].tool_calls"
        raise _invalid(param, "the calls are not answered; add a message of role tool for each of them")
    return {"continue_final_message": True}


def _is_empty(message: ChatMessage) -> bool:
    return not (message.text or message.reasoning_content or message.reasoning)


def _wire_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Raises InvalidRequestError for the result of a call that was not made."""
    names: dict[str, str] = {}
    wire: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        call_id = message.tool_call_id or ""
        if message.role == "tool" and call_id not in names:
            param = f"messages[{index}].tool_call_id"
            raise _invalid(param, f"no message of the assistant before it has a tool call `{call_id[:64]}`")
        wire.append(message.to_wire(tool_name=names.get(call_id)))
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
    return wire


def _n_top_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise _invalid("top_logprobs", "it needs `logprobs` to be true")
    return None


def _check_schema_size(schema: dict[str, Any] | None, param: str) -> None:
    if schema is not None and len(_encode(schema, param)) > MAX_SCHEMA_BYTES:
        message = f"Invalid value for `{param}`: the schema is longer than {MAX_SCHEMA_BYTES} bytes."
        raise InvalidRequestError(message, code="invalid_schema", param=param)


def _encode(value: dict[str, Any], param: str) -> bytes:
    # Not msgspec, which has no whole numbers beyond 64 bits; a schema may.
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        raise _invalid(param, "a number in it is too long") from None


def _invalid(param: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid value for `{param}`: {reason}.", param=param)
