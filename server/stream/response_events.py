"""Engine events → the bytes of an OpenAI Responses stream.

Order on the wire: response.created, response.in_progress; for each item of the output
response.output_item.added, then the parts, deltas and ends of its kind, then response.output_item.done; at
last response.completed or response.incomplete. After a failure, `error` and response.failed take the place of
the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from s2moe.engine.messages import Finished, PrefillProgress, Started, Step
from s2moe.server.convert.field_names import FieldNames
from s2moe.server.errors import ErrorReply
from s2moe.server.stream.answer_parts import AnswerParts, Change, Part
from s2moe.server.stream.chat_logprobs import token_logprobs
from s2moe.server.stream.response_object import (
    ItemStatus,
    end_of,
    item_id,
    item_of,
    last_status,
    reasoning_part,
    summary_part,
    text_part,
)
from s2moe.server.stream.sse import named_event

_DELTAS = {
    "text": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "call": "response.function_call_arguments.delta",
}
_json = msgspec.json.Encoder()


class ResponseEventEncoder:
    """An `answering.AnswerEncoder`.

    head       of response_object.head_of()
    names      how errors name the client's fields
    summarize  whether reasoning is also given as its own summary
    logprobs   whether the request asked for log probabilities of the text
    """

    def __init__(
        self, head: Mapping[str, Any], *, names: FieldNames, summarize: bool, logprobs: bool = False
    ) -> None:
        self._head = head
        self._id: str = head["id"]
        self._names = names
        self._summarize = summarize
        self._wants_logprobs = logprobs
        self._parts = AnswerParts()
        self._output: list[dict[str, Any]] = []
        self._sequence_number = 0
        self._delta_prefix = b""
        """Of the open item's delta events, up to the sequence number: the rest is all that changes."""

    def start(self) -> bytes:
        return self._event("response.created", response=self._head) + self._event(
            "response.in_progress", response=self._head
        )

    def progress(self, event: Started | PrefillProgress) -> bytes:
        return b""

    def feed(self, step: Step) -> bytes:
        data = b""
        for change in self._parts.feed(step):
            if change.what == "more":
                data += self._delta(change)
            elif change.what == "open":
                data += self._open(change.part)
            else:
                data += self._close(change.part, "completed")
        return data

    def finish_choice(self, event: Finished) -> bytes:
        data = b""
        for change in self._parts.finish():
            is_open = change.what == "open"
            data += self._open(change.part) if is_open else self._close(change.part, last_status(event))
        end = end_of(event)
        response = {**self._head, **end, "output": self._output}
        return data + self._event(f"response.{end['status']}", response=response)

    def finish(self) -> bytes:
        return b""

    def fail(self, reply: ErrorReply) -> bytes:
        data = b"" if self._sequence_number else self.start()
        error = self._names.translate_reply(reply).error
        code, message = error["code"], error["message"]
        data += self._event("error", code=code, message=message, param=error["param"])
        failed = {"status": "failed", "error": {"code": code, "message": message}, "output": self._output}
        return data + self._event("response.failed", response={**self._head, **failed})

    def _open(self, part: Part) -> bytes:
        item = item_of(part, self._id, "in_progress", summarize=self._summarize)
        data = self._event("response.output_item.added", output_index=part.index, item=item)
        place: dict[str, Any] = {"item_id": item["id"], "output_index": part.index}
        if part.kind != "call":
            place["content_index"] = 0
            begun = text_part("") if part.kind == "text" else reasoning_part("")
            data += self._event("response.content_part.added", **place, part=begun)
        kind = _DELTAS[part.kind]
        if part.kind == "text" and not self._wants_logprobs:
            place["logprobs"] = []
        constant = _json.encode({"type": kind, **place})[:-1]
        self._delta_prefix = b"event: " + kind.encode() + b"\ndata: " + constant + b',"sequence_number":'
        return data

    def _delta(self, change: Change) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        logprobs = b""
        if self._wants_logprobs and change.part.kind == "text":
            logprobs = b',"logprobs":' + _json.encode(token_logprobs(change.logprobs))
        return self._delta_prefix + b'%d,"delta":%b%b}\n\n' % (number, _json.encode(change.text), logprobs)

    def _close(self, part: Part, status: ItemStatus) -> bytes:
        text, index = part.text, part.index
        place: dict[str, Any] = {"item_id": item_id(self._id, part), "output_index": index}
        if part.kind == "call":
            ended = {"name": part.name, "arguments": text}
            data = self._event("response.function_call_arguments.done", **place, **ended)
        elif part.kind == "text":
            at = {**place, "content_index": 0}
            whole = text_part(text, part.logprobs)
            data = self._event("response.output_text.done", **at, text=text, logprobs=whole["logprobs"])
            data += self._event("response.content_part.done", **at, part=whole)
        else:
            at = {**place, "content_index": 0}
            data = self._event("response.reasoning_text.done", **at, text=text)
            data += self._event("response.content_part.done", **at, part=reasoning_part(text))
            if self._summarize:
                data += self._summary(place, text)
        item = item_of(part, self._id, status, summarize=self._summarize)
        self._output.append(item)
        return data + self._event("response.output_item.done", output_index=index, item=item)

    def _summary(self, place: Mapping[str, Any], text: str) -> bytes:
        at = {**place, "summary_index": 0}
        return b"".join(
            (
                self._event("response.reasoning_summary_part.added", **at, part=summary_part("")),
                self._event("response.reasoning_summary_text.delta", **at, delta=text),
                self._event("response.reasoning_summary_text.done", **at, text=text),
                self._event("response.reasoning_summary_part.done", **at, part=summary_part(text)),
            )
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return named_event(kind, value)
