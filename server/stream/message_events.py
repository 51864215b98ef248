"""Engine events → the bytes of an Anthropic Messages stream.

Order on the wire: message_start, ping; for each block content_block_start, content_block_delta*,
content_block_stop; message_delta, message_stop. After a failure, `error` takes the place of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from s2moe.engine.messages import Finished, PrefillProgress, Started, Step
from s2moe.server.convert.field_names import FieldNames
from s2moe.server.error_dialects import anthropic_body
from s2moe.server.errors import ErrorReply
from s2moe.server.stream.answer_parts import AnswerParts, Change, Part
from s2moe.server.stream.message_answer import SIGNATURE, begun_block, stop_of, usage_of
from s2moe.server.stream.sse import named_event

_DELTAS = {
    "text": b'{"type":"text_delta","text":',
    "reasoning": b'{"type":"thinking_delta","thinking":',
    "call": b'{"type":"input_json_delta","partial_json":',
}
_json = msgspec.json.Encoder()


class MessageEventEncoder:
    """An `answering.AnswerEncoder`.

    message     of message_answer.message_of()
    names       how errors name the client's fields
    request_id  goes with errors
    """

    def __init__(self, message: Mapping[str, Any], *, names: FieldNames, request_id: str | None) -> None:
        self._message = message
        self._names = names
        self._request_id = request_id
        self._parts = AnswerParts()
        self._delta_prefix = b""
        """Of the open block's delta events, up to the text."""

    def start(self) -> bytes:
        """Nothing: the first event tells the length of the prompt, which is not known yet."""
        return b""

    def progress(self, event: Started | PrefillProgress) -> bytes:
        if not isinstance(event, Started):
            return b""
        usage = usage_of(event.n_prompt_tokens, event.n_cached_tokens, 0)
        return _event("message_start", message={**self._message, "usage": usage}) + _event("ping")

    def feed(self, step: Step) -> bytes:
        return self._write(self._parts.feed(step))

    def finish_choice(self, event: Finished) -> bytes:
        data = self._write(self._parts.finish())
        usage = usage_of(event.n_prompt_tokens, event.n_cached_tokens, event.n_completion_tokens)
        return data + _event("message_delta", delta=stop_of(event), usage=usage) + _event("message_stop")

    def finish(self) -> bytes:
        return b""

    def fail(self, reply: ErrorReply) -> bytes:
        body = anthropic_body(self._names.translate_reply(reply), self._request_id)
        return b"event: error\ndata: " + _json.encode(body) + b"\n\n"

    def _write(self, changes: list[Change]) -> bytes:
        data = b""
        for change in changes:
            if change.what == "more":
                data += self._delta_prefix + _json.encode(change.text) + b"}}\n\n"
            elif change.what == "open":
                data += self._open(change.part)
            else:
                data += _close(change.part)
        return data

    def _open(self, part: Part) -> bytes:
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
        self._delta_prefix = head % part.index + _DELTAS[part.kind]
        return _event("content_block_start", index=part.index, content_block=begun_block(part))


def _close(part: Part) -> bytes:
    data = b""
    if part.kind == "reasoning":
        delta = {"type": "signature_delta", "signature": SIGNATURE}
        data = _event("content_block_delta", index=part.index, delta=delta)
    return data + _event("content_block_stop", index=part.index)


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
