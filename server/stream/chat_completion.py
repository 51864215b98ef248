"""Engine events → the body of a chat completion that is not streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from s2moe.engine.messages import Finished, Step
from s2moe.server.stream.chat_logprobs import token_logprobs
from s2moe.server.stream.choices import total_of
from s2moe.server.stream.tool_calls import ToolCalls
from s2moe.server.stream.usage import performance_of, usage_of

REASONING_NAMES: Final = ("reasoning_content", "reasoning")
"""Of the field that holds what the model thought: llama.cpp's and vLLM's. Clients read one or the other."""


class ChatCompletionBuilder:
    """An `answering.AnswerBuilder`."""

    def __init__(
        self,
        *,
        completion_id: str,
        created: int,
        model: str,
        fingerprint: Callable[[], str],
        logprobs: bool = False,
        reasoning_names: Sequence[str] = REASONING_NAMES,
    ) -> None:
        """`fingerprint` is asked at the end, when the model is surely known; `logprobs`: whether the request
        asked for them; `reasoning_names`: of the fields that reasoning is given in."""
        self._head = {
            "id": completion_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
        }
        self._fingerprint = fingerprint
        self._wants_logprobs = logprobs
        self._reasoning_names = reasoning_names
        self._choices: list[dict[str, Any]] = []
        self._finished: list[Finished] = []
        self._begin_choice()

    def feed(self, step: Step) -> None:
        self._content.append(step.content)
        self._reasoning.append(step.reasoning)
        self._calls.add(step.tool_calls)
        self._logprobs += token_logprobs(step.logprobs)

    def finish_choice(self, event: Finished) -> None:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._calls:
            message |= {"content": content or None, "tool_calls": self._calls.whole()}
        if reasoning := "".join(self._reasoning):
            message |= dict.fromkeys(self._reasoning_names, reasoning)
        self._choices.append(
            {
                "index": len(self._choices),
                "message": message,
                "logprobs": {"content": self._logprobs, "refusal": None} if self._wants_logprobs else None,
                "finish_reason": event.reason,
            }
        )
        self._finished.append(event)
        self._begin_choice()

    def finish(self) -> dict[str, Any]:
        total = total_of(self._finished, per_prompt=len(self._finished))
        return {
            **self._head,
            "system_fingerprint": self._fingerprint(),
            "choices": self._choices,
            "usage": usage_of(total),
            **performance_of(total),
        }

    def _begin_choice(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls = ToolCalls()
        self._logprobs: list[dict[str, Any]] = []
