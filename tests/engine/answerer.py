"""Answers of a model without a library, and the markup that a parser of them reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from fake_model import FakeModel, FakeSampler

from s2moe.engine import generation
from s2moe.engine.generation import Generation
from s2moe.engine.messages import Finished, Generate, Step, ToolCallDelta
from s2moe.engine.stream.answer import Delta

PROMPT = "ask"
SCRIPTED = "scripted"
"""The format that MarkupParser reads."""


def request(**options: Any) -> Generate:
    messages = [{"role": "user", "content": PROMPT}]
    options.setdefault("messages_json", json.dumps(messages).encode())
    return Generate(request_id="r", **options)


class MarkupParser:
    """`(reasoning)content[name|arguments]`; `name#id` where the format has ids. Every letter is decided at
    once."""

    def __init__(self, *_arguments: object) -> None:
        self._mode = "content"
        self._name = ""
        self._n_calls = 0

    def feed(self, text: str, *, final: bool) -> Delta:
        parts = {"content": "", "reasoning": ""}
        calls: list[ToolCallDelta] = []
        for letter in text:
            if letter in "()]":
                self._mode = "reasoning" if letter == "(" else "content"
            elif letter == "[":
                self._mode, self._name = "name", ""
            elif self._mode == "name" and letter == "|":
                name, _, id_ = self._name.partition("#")
                calls.append(ToolCallDelta(index=self._n_calls, id=id_, name=name))
                self._mode = "arguments"
                self._n_calls += 1
            elif self._mode == "name":
                self._name += letter
            elif self._mode == "arguments":
                calls.append(ToolCallDelta(index=self._n_calls - 1, arguments=letter))
            else:
                parts[self._mode] += letter
        return Delta(parts["content"], parts["reasoning"], calls)

    def close(self) -> None:
        pass


class Answerer:
    """Answers with given tokens."""

    def __init__(
        self, model: FakeModel, monkeypatch: pytest.MonkeyPatch, tokens: str | Sequence[int]
    ) -> None:
        self.model = model
        self.sampler = FakeSampler(tokens)
        self.params: dict[str, Any] = {}
        """Of the sampler, once it was made."""

        def make_sampler(
            _library: object, _handle: object, params: dict[str, Any], _abort: object
        ) -> FakeSampler:
            self.params = params
            return self.sampler

        monkeypatch.setattr(generation, "Sampler", make_sampler)
        monkeypatch.setattr(generation, "NativeAnswerParser", MarkupParser)

    def answer(self, **options: Any) -> tuple[list[Step], Finished]:
        events = list(self.start(**options).run())
        assert isinstance(events[-1], Finished)
        return [event for event in events if isinstance(event, Step)], events[-1]

    def start(self, **options: Any) -> Generation:
        model: Any = self.model
        return Generation(model, request(**options))
