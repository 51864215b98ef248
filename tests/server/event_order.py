"""What is allowed in the event streams of Responses and Messages: checkers of whole sequences."""

from __future__ import annotations

import json
from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

Event = dict[str, Any]

_MODELS: dict[str, type[BaseModel]] = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in get_args(get_args(ResponseStreamEvent)[0])
}
"""OpenAI's own declarations of the events of Responses, by type."""
_TEXT_EVENTS = {"message": "output_text", "reasoning": "reasoning_text"}
_BLOCK_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def named_events(data: bytes | str) -> list[Event]:
    """The events of a body of server-sent events, comments dropped; checks that each has its type as name."""
    text = data.decode() if isinstance(data, bytes) else data
    assert not text or text.endswith("\n\n")
    events: list[Event] = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, payload = block.split("\n")
        event = json.loads(payload.removeprefix("data: "), parse_constant=_refuse)
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


class Cursor:
    """Takes events one by one and asserts what they are."""

    def __init__(self, events: list[Event]) -> None:
        self._events = list(reversed(events))
        self.logprobs: list[Any] = []
        """Of the deltas that were taken last, where they have any."""

    @property
    def next_type(self) -> str:
        return str(self._events[-1]["type"]) if self._events else ""

    def take(self, kind: str, **fields: Any) -> Event:
        assert self._events, f"the stream ends where {kind} is due"
        event = self._events.pop()
        assert event["type"] == kind
        assert {name: event.get(name) for name in fields} == fields
        return event

    def deltas(self, kind: str, **fields: Any) -> str:
        text = ""
        self.logprobs = []
        while self.next_type == kind:
            event = self.take(kind, **fields)
            assert isinstance(event["delta"], str)
            text += event["delta"]
            self.logprobs += event.get("logprobs", [])
        return text


def check_response_events(events: list[Event]) -> Event:
    """Returns the response of the last event. Raises AssertionError."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        model = _MODELS[event["type"]]  # a type that OpenAI does not know is a KeyError
        if event["type"] != "response.failed":  # its codes are ours
            model.model_validate(event)
    cursor = Cursor(events)
    created = cursor.take("response.created")["response"]
    assert created["status"] == "in_progress"
    assert created["output"] == []
    assert cursor.take("response.in_progress")["response"] == created
    output: list[Event] = []
    while cursor.next_type == "response.output_item.added":
        item = _take_item(cursor, len(output))
        if item is None:
            break
        output.append(item)
    end = _take_end(cursor)
    assert cursor.next_type == ""
    assert end["id"] == created["id"]
    assert end["output"] == output
    assert len({item["id"] for item in output}) == len(output)
    if end["status"] != "failed":
        Response.model_validate(end)
        assert [item["status"] for item in output[:-1]] == ["completed"] * (len(output) - 1)
        assert output[-1]["status"] == end["status"]
    return end


def _take_item(cursor: Cursor, index: int) -> Event | None:
    """None: the stream failed within the item."""
    begun = cursor.take("response.output_item.added", output_index=index)["item"]
    assert begun["status"] == "in_progress"
    place = {"item_id": begun["id"], "output_index": index}
    if begun["type"] == "function_call":
        assert begun["arguments"] == ""
        text = cursor.deltas("response.function_call_arguments.delta", **place)
        if cursor.next_type == "error":
            return None
        cursor.take("response.function_call_arguments.done", **place, arguments=text, name=begun["name"])
        expected = {**begun, "arguments": text}
    else:
        assert begun["content"] == []
        kind = _TEXT_EVENTS[begun["type"]]
        at = {**place, "content_index": 0}
        part = cursor.take("response.content_part.added", **at)["part"]
        assert (part["type"], part["text"]) == (kind, "")
        text = cursor.deltas(f"response.{kind}.delta", **at)
        if cursor.next_type == "error":
            return None
        ended: Event = {"text": text}
        if kind == "output_text":
            ended["logprobs"] = cursor.logprobs
        cursor.take(f"response.{kind}.done", **at, **ended)
        whole = {**part, **ended}
        cursor.take("response.content_part.done", **at, part=whole)
        expected = {**begun, "content": [whole]}
    if cursor.next_type == "response.reasoning_summary_part.added":
        at = {**place, "summary_index": 0}
        part = {"type": "summary_text", "text": ""}
        cursor.take("response.reasoning_summary_part.added", **at, part=part)
        assert cursor.deltas("response.reasoning_summary_text.delta", **at) == text
        cursor.take("response.reasoning_summary_text.done", **at, text=text)
        cursor.take("response.reasoning_summary_part.done", **at, part={**part, "text": text})
        expected["summary"] = [{**part, "text": text}]
    item: Event = cursor.take("response.output_item.done", output_index=index)["item"]
    assert item["status"] in ("completed", "incomplete")
    assert {**item, "status": "in_progress"} == expected
    return item


def _take_end(cursor: Cursor) -> Event:
    if cursor.next_type == "error":
        error = cursor.take("error")
        response: Event = cursor.take("response.failed")["response"]
        assert response["status"] == "failed"
        assert response["error"] == {"code": error["code"], "message": error["message"]}
        return response
    kind = cursor.next_type
    assert kind in ("response.completed", "response.incomplete")
    response = cursor.take(kind)["response"]
    assert kind == f"response.{response['status']}"
    reason = {"reason": "max_output_tokens"} if response["status"] == "incomplete" else None
    assert response["incomplete_details"] == reason
    return response


def check_message_events(events: list[Event]) -> Event:
    """Returns the message that the events make. Raises AssertionError."""
    cursor = Cursor(events)
    message: Event = cursor.take("message_start")["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    cursor.take("ping")
    while cursor.next_type == "content_block_start":
        message["content"].append(_take_block(cursor, len(message["content"])))
    if cursor.next_type == "error":
        message["error"] = cursor.take("error")["error"]
    else:
        end = cursor.take("message_delta")
        message |= end["delta"]
        message["usage"] |= end["usage"]
        assert message["stop_reason"] is not None
        cursor.take("message_stop")
    assert cursor.next_type == ""
    return message


def _take_block(cursor: Cursor, index: int) -> Event:
    block: Event = cursor.take("content_block_start", index=index)["content_block"]
    kind, key = _BLOCK_DELTAS[block["type"]]
    text, signature = "", ""
    while cursor.next_type == "content_block_delta":
        delta = cursor.take("content_block_delta", index=index)["delta"]
        assert not signature, "a signature is the end of its block"
        if delta["type"] == "signature_delta":
            assert block["type"] == "thinking"
            signature = delta["signature"]
        else:
            assert delta["type"] == kind
            text += delta[key]
    if block["type"] == "tool_use":
        assert block["input"] == {}
        block["partial_json"] = text
    else:
        assert block[key] == ""
        block[key] = text
    if block["type"] == "thinking":
        block["signature"] = signature
    if cursor.next_type != "error":
        cursor.take("content_block_stop", index=index)
    return block
