"""Engine events → OpenAI's response object, and the items of its output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from s2moe.engine.messages import Finished, Step, TokenLogprob
from s2moe.server.convert.responses import names_of
from s2moe.server.schema.responses import FUNCTION, ResponsesRequest, ResponsesTool, TextFormat
from s2moe.server.schema.sampling import MOST_TOKENS
from s2moe.server.stream.answer_parts import AnswerParts, Part
from s2moe.server.stream.chat_logprobs import token_logprobs
from s2moe.server.stream.usage import performance_of

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ID_PREFIXES: Final = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}


def head_of(body: ResponsesRequest, *, response_id: str, created: int, model: str) -> dict[str, Any]:
    """What is known of the response from the beginning, with the fields that it gives back as they came.

    `response_id` begins with `resp_`; the ids of the items follow from it.
    """
    reasoning = body.reasoning
    has_limit = body.max_output_tokens != MOST_TOKENS
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens if has_limit else None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "store": False,
        "temperature": body.temperature,
        "text": {"format": _format_of(body.text.format if body.text else None)},
        "tool_choice": _choice_of(body.tool_choice),
        "tools": [_tool_of(tool) for tool in body.tools or () if tool.type == FUNCTION],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _format_of(form: TextFormat | None) -> dict[str, Any]:
    if form is None:
        return {"type": "text"}
    known = form.model_dump(by_alias=True, exclude_none=True)
    return known if form.schema_ is None else {**known, "schema": _as_is(form.schema_)}


def _choice_of(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any]:
    if isinstance(choice, Mapping):
        if choice["type"] == FUNCTION:
            return {"type": FUNCTION, "name": choice["name"]}
        tools = [{"type": FUNCTION, "name": name} for name in names_of(choice["tools"])]
        return {"type": "allowed_tools", "mode": choice["mode"], "tools": tools}
    return choice or "auto"


def _tool_of(tool: ResponsesTool) -> dict[str, Any]:
    parameters = None if tool.parameters is None else _as_is(tool.parameters)
    return {**tool.model_dump(), "parameters": parameters}


def _as_is(schema: Mapping[str, Any]) -> msgspec.Raw:
    # msgspec has no whole numbers beyond 64 bits; a schema may
    return msgspec.Raw(json.dumps(schema, ensure_ascii=False, separators=(",", ":")).encode())


def item_id(response_id: str, part: Part) -> str:
    return f"{ID_PREFIXES[part.kind]}{response_id.removeprefix('resp_')}_{part.index}"


def item_of(part: Part, response_id: str, status: ItemStatus, *, summarize: bool) -> dict[str, Any]:
    """One item of the output. In progress, it is as it was when it began.

    summarize  whether reasoning is also given as its own summary, which is all that some clients show
    """
    head = {"id": item_id(response_id, part), "status": status}
    begun = status == "in_progress"
    if part.kind == "call":
        arguments = "" if begun else part.text
        call = {"call_id": part.call_id, "name": part.name, "arguments": arguments}
        return {"type": "function_call", **head, **call}
    if part.kind == "text":
        content = [] if begun else [text_part(part.text, part.logprobs)]
        return {"type": "message", **head, "role": "assistant", "content": content}
    return {
        "type": "reasoning",
        **head,
        "summary": [summary_part(part.text)] if summarize and not begun else [],
        "content": [] if begun else [reasoning_part(part.text)],
    }


def text_part(text: str, logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": token_logprobs(logprobs)}


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def last_status(event: Finished) -> ItemStatus:
    """Of the item with which the answer ended."""
    return "incomplete" if event.reason == "length" else "completed"


def end_of(event: Finished) -> dict[str, Any]:
    """What the end adds to a response, but for its output."""
    end: dict[str, Any] = {"status": last_status(event)}
    if event.reason == "length":
        end["incomplete_details"] = {"reason": "max_output_tokens"}
    return {**end, "usage": _usage_of(event), **performance_of(event)}


def _usage_of(event: Finished) -> dict[str, Any]:
    return {
        "input_tokens": event.n_prompt_tokens,
        "input_tokens_details": {"cached_tokens": event.n_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": event.n_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": event.n_reasoning_tokens},
        "total_tokens": event.n_prompt_tokens + event.n_completion_tokens,
    }


class ResponseBuilder:
    """An `answering.AnswerBuilder`. `head` is of head_of()."""

    def __init__(self, head: Mapping[str, Any], *, summarize: bool) -> None:
        self._head = head
        self._summarize = summarize
        self._parts = AnswerParts()
        self._end: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []

    def feed(self, step: Step) -> None:
        self._parts.feed(step)

    def finish_choice(self, event: Finished) -> None:
        self._parts.finish()
        last = self._parts.parts[-1]
        self._output = [
            item_of(
                part,
                self._head["id"],
                last_status(event) if part is last else "completed",
                summarize=self._summarize,
            )
            for part in self._parts.parts
        ]
        self._end = end_of(event)

    def finish(self) -> dict[str, Any]:
        return {**self._head, **self._end, "output": self._output}
