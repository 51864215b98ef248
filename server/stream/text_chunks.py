"""Engine events → the bytes of an OpenAI text completion stream.

Order on the wire: for each choice its prompt if it is echoed, text chunks, and a final chunk with
finish_reason; then the usage chunk if asked, [DONE]; or, after a failure, an error event and nothing more.
"""

from __future__ import annotations

from typing import Any

import msgspec

from s2moe.engine.messages import Finished, PrefillProgress, Started, Step
from s2moe.server.errors import ErrorReply
from s2moe.server.stream.sse import DONE
from s2moe.server.stream.sse import event as event_of
from s2moe.server.stream.text_answer import TextAnswer
from s2moe.server.stream.text_logprobs import TextLogprobs

_json = msgspec.json.Encoder()


class TextChunkEncoder:
    """An `answering.AnswerEncoder`. All that is constant in a text chunk is encoded once per choice, because
    the rest runs once per token.
    """

    def __init__(self, answer: TextAnswer, *, system_fingerprint: str, include_usage: bool) -> None:
        self._answer = answer
        self._include_usage = include_usage
        self._head = {**answer.head, "system_fingerprint": system_fingerprint}
        # {"id":…,"system_fingerprint":… without the closing brace.
        self._prefix = b"data: " + _json.encode(self._head)[:-1] + b',"choices":[{"index":'
        self._end = b"]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._suffix = b',"logprobs":null,"finish_reason":null}' + self._end
        self._text_prefix = b""
        self._logprobs = TextLogprobs()
        self._finished: list[Finished] = []

    def start(self) -> bytes:
        return self._begin_choice()

    def progress(self, event: Started | PrefillProgress) -> bytes:
        return b""

    def feed(self, step: Step) -> bytes:
        if step.logprobs:
            logprobs = _json.encode(self._logprobs.convert(step.logprobs))
            suffix = b',"logprobs":' + logprobs + b',"finish_reason":null}' + self._end
            return self._text_prefix + _json.encode(step.content) + suffix
        if not step.content:
            return b""
        return self._text_prefix + _json.encode(step.content) + self._suffix

    def finish_choice(self, event: Finished) -> bytes:
        choice = {
            "index": len(self._finished),
            "text": "",
            "logprobs": None,
            "finish_reason": event.reason,
        }
        self._finished.append(event)
        final: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._include_usage:
            final["usage"] = None
        if len(self._finished) < self._answer.n_choices:
            return event_of(final) + self._begin_choice()
        accounts = self._answer.accounts_of(self._finished)
        if not self._include_usage:
            del accounts["usage"]
            return event_of(final | accounts)
        return event_of(final) + event_of({**self._head, "choices": [], **accounts})

    def finish(self) -> bytes:
        return DONE

    def fail(self, reply: ErrorReply) -> bytes:
        """An in-band error. No [DONE] follows, so that a cut answer never looks complete."""
        return event_of(reply.body)

    def _begin_choice(self) -> bytes:
        index = len(self._finished)
        self._text_prefix = self._prefix + str(index).encode() + b',"text":'
        self._logprobs = TextLogprobs()
        echo = self._answer.echo_of(index)
        return self._text_prefix + _json.encode(echo) + self._suffix if echo else b""
