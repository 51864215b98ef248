"""Engine events → the bytes of an OpenAI chat stream.

Order on the wire: role chunk, text chunks, final chunk with finish_reason, usage chunk if asked, [DONE];
or, after a failure, an error event and nothing more.
"""

from __future__ import annotations

from typing import Any

import msgspec

from s2moe.engine.messages import Finished, PrefillProgress, Started, Step
from s2moe.server.errors import ErrorReply
from s2moe.server.stream.usage import performance_of, usage_of

_DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder()


class ChatChunkEncoder:
    """An `answering.AnswerEncoder`. All that is constant in a text chunk is encoded once, here, because the
    rest runs once per token.
    """

    def __init__(
        self, *, completion_id: str, created: int, model: str, system_fingerprint: str, include_usage: bool
    ) -> None:
        self._include_usage = include_usage
        self._head = {
            "id": completion_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "system_fingerprint": system_fingerprint,
        }
        # {"id":…,"system_fingerprint":… without the closing brace.
        prefix = b"data: " + _json.encode(self._head)[:-1] + b',"choices":[{"index":0,"delta":'
        usage = b',"usage":null' if include_usage else b""
        self._suffix = b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._content_prefix = prefix + b'{"content":'
        self._reasoning_prefix = prefix + b'{"reasoning_content":'
        self._text_suffix = b"}" + self._suffix
        self._start = prefix + b'{"role":"assistant","content":""}' + self._suffix

    def start(self) -> bytes:
        """The role chunk; sent once, since clients concatenate roles."""
        return self._start

    def feed(self, step: Step) -> bytes:
        """One event per kind of text in the step; reasoning comes first and never shares a chunk."""
        if not step.reasoning:
            if not step.content:
                return b""
            return self._content_prefix + _json.encode(step.content) + self._text_suffix
        text = _json.encode(step.reasoning)
        # The same text under both names in use: llama.cpp's and vLLM's.
        data = self._reasoning_prefix + text + b',"reasoning":' + text + self._text_suffix
        if step.content:
            data += self._content_prefix + _json.encode(step.content) + self._text_suffix
        return data

    def progress(self, event: Started | PrefillProgress) -> bytes:
        return b""

    def finish_choice(self, event: Finished) -> bytes:
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": event.reason}
        final: dict[str, Any] = {**self._head, "choices": [choice]}
        performance = performance_of(event)
        if not self._include_usage:
            return _event(final | performance)
        usage = {**self._head, "choices": [], "usage": usage_of(event), **performance}
        return _event({**final, "usage": None}) + _event(usage)

    def finish(self) -> bytes:
        return _DONE

    def fail(self, reply: ErrorReply) -> bytes:
        """An in-band error. No [DONE] follows, so that a cut answer never looks complete."""
        return _event(reply.body)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _json.encode(value) + b"\n\n"
