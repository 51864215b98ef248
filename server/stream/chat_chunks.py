"""Engine events → the bytes of an OpenAI chat stream.

Order on the wire: for each choice its role chunk, prompt_progress if asked, reasoning, text and tool calls,
and a final chunk with finish_reason; then the usage chunk if asked, [DONE]; or, after a failure, an error
event and nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from s2moe.engine.messages import Finished, PrefillProgress, Started, Step, ToolCallDelta
from s2moe.server.errors import ErrorReply
from s2moe.server.stream.chat_completion import REASONING_NAMES
from s2moe.server.stream.chat_logprobs import token_logprobs
from s2moe.server.stream.choices import total_of
from s2moe.server.stream.sse import DONE
from s2moe.server.stream.sse import event as event_of
from s2moe.server.stream.usage import performance_of, usage_of

_json = msgspec.json.Encoder()


class ChatChunkEncoder:
    """An `answering.AnswerEncoder`. All that is constant in a text chunk is encoded once per choice, because
    the rest runs once per token.
    """

    def __init__(
        self,
        *,
        completion_id: str,
        created: int,
        model: str,
        system_fingerprint: str,
        include_usage: bool,
        n_choices: int = 1,
        return_progress: bool = False,
        reasoning_names: Sequence[str] = REASONING_NAMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reasoning_names`: of the fields that reasoning is given in. `clock` gives seconds, for the time in
        prompt_progress."""
        self._include_usage = include_usage
        self._n_choices = n_choices
        self._return_progress = return_progress
        self._reasoning_names = reasoning_names
        self._clock = clock
        self._finished: list[Finished] = []
        self._head = {
            "id": completion_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "system_fingerprint": system_fingerprint,
        }
        # {"id":…,"system_fingerprint":… without the closing brace.
        self._envelope = b"data: " + _json.encode(self._head)[:-1] + b',"choices":[{"index":'
        usage = b',"usage":null' if include_usage else b""
        self._end = b',"finish_reason":null}]' + usage + b"}\n\n"
        self._suffix = b',"logprobs":null' + self._end
        self._text_suffix = b"}" + self._suffix
        self._reasoning_keys = [_json.encode(name) + b":" for name in reasoning_names]
        self._prefix = self._content_prefix = b""
        self._progress: dict[str, int] = {}
        self._prefill_began = 0.0

    def start(self) -> bytes:
        return self._begin_choice()

    def feed(self, step: Step) -> bytes:
        """One event per kind of text in the step; reasoning comes first and never shares a chunk."""
        if step.tool_calls or step.logprobs:
            return self._feed_parts(step)
        if not step.reasoning:
            if not step.content:
                return b""
            return self._content_prefix + _json.encode(step.content) + self._text_suffix
        text = _json.encode(step.reasoning)
        fields = b",".join([key + text for key in self._reasoning_keys])
        data = self._prefix + b"{" + fields + self._text_suffix
        if step.content:
            data += self._content_prefix + _json.encode(step.content) + self._text_suffix
        return data

    def progress(self, event: Started | PrefillProgress) -> bytes:
        """llama-server's prompt_progress: the first one has what is reused, the last one the whole prompt."""
        if not self._return_progress:
            return b""
        if isinstance(event, Started):
            self._prefill_began = self._clock()
            self._progress = {"total": event.n_prompt_tokens, "cache": event.n_cached_tokens}
            n_done = event.n_cached_tokens
        else:
            n_done = event.n_done_tokens
        milliseconds = int((self._clock() - self._prefill_began) * 1e3)
        progress = {**self._progress, "processed": n_done, "time_ms": milliseconds}
        chunk = self._prefix + b"{}" + self._suffix.removesuffix(b"}\n\n")
        return chunk + b',"prompt_progress":' + _json.encode(progress) + b"}\n\n"

    def finish_choice(self, event: Finished) -> bytes:
        index = len(self._finished)
        self._finished.append(event)
        choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": event.reason}
        final: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._include_usage:
            final["usage"] = None
        if len(self._finished) < self._n_choices:
            return event_of(final) + self._begin_choice()
        total = total_of(self._finished, per_prompt=len(self._finished))
        if not self._include_usage:
            return event_of(final | performance_of(total))
        usage = {**self._head, "choices": [], "usage": usage_of(total), **performance_of(total)}
        return event_of(final) + event_of(usage)

    def finish(self) -> bytes:
        return DONE

    def fail(self, reply: ErrorReply) -> bytes:
        """An in-band error. No [DONE] follows, so that a cut answer never looks complete."""
        return event_of(reply.body)

    def _begin_choice(self) -> bytes:
        """The role chunk; sent once per choice, since clients concatenate roles."""
        self._prefix = self._envelope + str(len(self._finished)).encode() + b',"delta":'
        self._content_prefix = self._prefix + b'{"content":'
        return self._prefix + b'{"role":"assistant","content":null}' + self._suffix

    def _feed_parts(self, step: Step) -> bytes:
        """A step with tool calls or log probabilities; these are in the last of its chunks."""
        deltas = list(self._deltas_of(step))
        if not step.logprobs:
            return b"".join(self._prefix + _json.encode(delta) + self._suffix for delta in deltas)
        *others, last = deltas or [{}]
        data = b"".join(self._prefix + _json.encode(delta) + self._suffix for delta in others)
        logprobs = _json.encode({"content": token_logprobs(step.logprobs), "refusal": None})
        return data + self._prefix + _json.encode(last) + b',"logprobs":' + logprobs + self._end

    def _deltas_of(self, step: Step) -> Iterator[dict[str, Any]]:
        if step.reasoning:
            yield dict.fromkeys(self._reasoning_names, step.reasoning)
        if step.content:
            yield {"content": step.content}
        for call in step.tool_calls:
            yield from _call_deltas(call)


def _call_deltas(call: ToolCallDelta) -> Iterator[dict[str, Any]]:
    """Id, type and name come once, before any piece of the arguments: clients concatenate them."""
    if call.id or call.name:
        function = {"name": call.name, "arguments": ""}
        opening = {"index": call.index, "id": call.id, "type": "function", "function": function}
        yield {"tool_calls": [opening]}
    if call.arguments:
        yield {"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]}
