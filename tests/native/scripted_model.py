"""Answers of given tokens, with the templates and parsers of the library: all that an answer runs through."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any, Final

import pytest
from fake_model import FakeModel, FakeSampler
from fake_vocabulary import FakeVocabulary

from s2moe.engine import generation
from s2moe.engine.generation import Generation
from s2moe.engine.messages import Finished, Generate, Speculation, Step
from s2moe.engine.native import ChatTemplate, Library
from s2moe.engine.stream.answer import Delta

from chat_families import Family
from chat_rig import USER, Answer, template_text

END: Final = 0
_CONTROL: Final = re.compile(r"(<\|[^<>|]*\|>|<｜[^<>｜]*｜>|\[/?(?:TOOL_CALLS|ARGS|THINK)\])")  # noqa: RUF001
"""Control tokens: of Mistral's vocabularies the latter; in all others llama.cpp's converter makes one of each
added token that looks like the former."""


class ScriptedVocabulary(FakeVocabulary):
    """A control token is no text unless that is asked for; any other bytes are a token, too."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = [END]
        self._tokens: list[tuple[bytes, bool]] = [(b"", True)]
        """Bytes of each token, and whether it is a control token."""

    def encode(self, text: str, random: Random) -> list[int]:
        """Between control tokens each has 1 to 5 bytes, which may begin and end within characters."""
        tokens: list[int] = []
        for part in _CONTROL.split(text):
            data, is_control = part.encode(), _CONTROL.fullmatch(part) is not None
            while data:
                size = len(data) if is_control else random.randint(1, 5)
                tokens.append(self._token(data[:size], is_control=is_control))
                data = data[size:]
        return tokens

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        parts = _CONTROL.split(text) if parse_special else [text]
        return [
            self._token(part.encode(), is_control=_CONTROL.fullmatch(part) is not None)
            for part in parts
            if part
        ]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        data, is_control = self._tokens[token]
        return b"" if is_control and not special else data

    def _token(self, data: bytes, *, is_control: bool) -> int:
        if (data, is_control) not in self._tokens:
            self._tokens.append((data, is_control))
        return self._tokens.index((data, is_control))


class ScriptedModel(FakeModel):
    """Of the library it has the template and the parser."""

    def __init__(self, library: Library, template: ChatTemplate) -> None:
        super().__init__()
        self.library: Any = library
        self.chat_template: Any = template
        self.vocabulary = ScriptedVocabulary()
        self.n_ctx = self.n_batch = 1 << 16


def answer_of(
    library: Library,
    family: Family,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    *,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    own_call_ids: bool = False,
    **options: Any,
) -> tuple[Answer, Finished]:
    """What a client gets of a model that writes `text` and ends its turn. `seed`: of where tokens begin."""
    template = ChatTemplate(library, None, template_text(family.template))
    model: Any = ScriptedModel(library, template)
    sampler = FakeSampler([*model.vocabulary.encode(text, Random(seed)), END])
    monkeypatch.setattr(generation, "Sampler", lambda *_: sampler)
    request = Generate(
        request_id="r",
        messages_json=json.dumps(USER).encode(),
        chat_options_json=json.dumps(family.options | options).encode(),
        speculation=Speculation(method="off"),
        stop=list(stop),
        own_call_ids=own_call_ids,
    )
    answer = Answer()
    try:
        *events, end = Generation(model, request).run()
    finally:
        template.close()
    for event in events:
        if isinstance(event, Step):
            answer.add(Delta(event.content, event.reasoning, event.tool_calls))
    assert isinstance(end, Finished)
    return answer, end
