"""Engine events → the body of a text completion that is not streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from s2moe.engine.messages import Finished, Step, TokenLogprob
from s2moe.server.stream.text_answer import TextAnswer
from s2moe.server.stream.text_logprobs import TextLogprobs


class TextCompletionBuilder:
    """An `answering.AnswerBuilder`."""

    def __init__(self, answer: TextAnswer, *, fingerprint: Callable[[], str], with_logprobs: bool) -> None:
        """`fingerprint` is asked at the end, when the model is surely known."""
        self._answer = answer
        self._fingerprint = fingerprint
        self._with_logprobs = with_logprobs
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._choices: list[dict[str, Any]] = []
        self._finished: list[Finished] = []

    def feed(self, step: Step) -> None:
        self._texts.append(step.content)
        self._logprobs += step.logprobs

    def finish_choice(self, event: Finished) -> None:
        index = len(self._finished)
        logprobs = TextLogprobs().convert(self._logprobs) if self._with_logprobs else None
        self._choices.append(
            {
                "index": index,
                "text": self._answer.echo_of(index) + "".join(self._texts),
                "logprobs": logprobs,
                "finish_reason": event.reason,
            }
        )
        self._finished.append(event)
        self._texts.clear()
        self._logprobs.clear()

    def finish(self) -> dict[str, Any]:
        return {
            **self._answer.head,
            "system_fingerprint": self._fingerprint(),
            "choices": self._choices,
            **self._answer.accounts_of(self._finished),
        }
