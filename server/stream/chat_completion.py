"""Engine events → the body of a chat completion that is not streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from s2moe.engine.messages import Finished, Step
from s2moe.server.stream.usage import performance_of, usage_of


class ChatCompletionBuilder:
    """An `answering.AnswerBuilder`."""

    def __init__(
        self, *, completion_id: str, created: int, model: str, fingerprint: Callable[[], str]
    ) -> None:
        """`fingerprint` is asked at the end, when the model is surely known."""
        self._head = {
            "id": completion_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
        }
        self._fingerprint = fingerprint
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._choices: list[dict[str, Any]] = []
        self._last: Finished | None = None

    def feed(self, step: Step) -> None:
        self._content.append(step.content)
        self._reasoning.append(step.reasoning)

    def finish_choice(self, event: Finished) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if reasoning := "".join(self._reasoning):
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        self._choices.append(
            {
                "index": len(self._choices),
                "message": message,
                "logprobs": None,
                "finish_reason": event.reason,
            }
        )
        self._last = event

    def finish(self) -> dict[str, Any]:
        assert self._last is not None
        return {
            **self._head,
            "system_fingerprint": self._fingerprint(),
            "choices": self._choices,
            "usage": usage_of(self._last),
            **performance_of(self._last),
        }
