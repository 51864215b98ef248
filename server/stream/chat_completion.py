"""Engine events → the body of a chat completion that is not streamed."""

from __future__ import annotations

from typing import Any

from s2moe.engine.messages import Finished, Step
from s2moe.server.stream.usage import performance_of, usage_of


class ChatCompletionBuilder:
    """Collects the steps of one answer: `feed()` each, then `finish()` once."""

    def __init__(self, *, completion_id: str, created: int, model: str) -> None:
        self._head = {
            "id": completion_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
        }
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def feed(self, step: Step) -> None:
        self._content.append(step.content)
        self._reasoning.append(step.reasoning)

    def finish(self, event: Finished, *, system_fingerprint: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if reasoning := "".join(self._reasoning):
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": event.reason}
        return {
            **self._head,
            "system_fingerprint": system_fingerprint,
            "choices": [choice],
            "usage": usage_of(event),
            **performance_of(event),
        }
