"""A model without a library: it goes on with the letters of a text, its speculator with several at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from s2moe.engine.errors import RequestAbortedError
from s2moe.engine.messages import Speculation
from s2moe.engine.native import NativeError
from s2moe.engine.speculation import SpeculationSupport

END = ord(".")
"""The token that ends generation."""


class FakeSwitch:
    requested = False


class FakeTemplate:
    def apply(self, request_json: bytes) -> bytes:
        prompt = "".join(message["content"] for message in json.loads(request_json)["messages"])
        return json.dumps(
            {"prompt": prompt, "format": "content-only", "stops": [], "preserved_tokens": []}
        ).encode()


class FakeSampler:
    """Chooses the text's next letter, whatever the model says."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.n_chosen = 0
        self.failure: NativeError | None = None

    def sample(self, _context: object) -> int:
        if self.failure is not None:
            raise self.failure
        self.n_chosen += 1
        return ord(self.text[self.n_chosen - 1])

    def accept_prompt(self, _tokens: list[int]) -> None:
        pass

    def close(self) -> None:
        pass


class FakeSpeculator:
    """Returns `width` letters a step."""

    def __init__(self, width: int = 3) -> None:
        self.width = width
        self.begun: list[dict[str, Any]] = []
        self.steps: list[tuple[int, int, int]] = []
        """root, position and n_max of each."""
        self.begin_failure: NativeError | None = None
        self.step_failure: NativeError | None = None
        self.fed: list[list[int]] = []
        self.on_step: Callable[[], None] = lambda: None
        self.detail = ""

    def begin(self, options: Mapping[str, Any]) -> None:
        if self.begin_failure is not None:
            raise self.begin_failure
        self.begun.append(dict(options))

    def feed(self, tokens: list[int]) -> None:
        self.fed.append(list(tokens))

    def step(self, sampler: FakeSampler, root: int, position: int, n_max: int) -> list[int]:
        self.on_step()
        self.steps.append((root, position, n_max))
        if self.step_failure is not None:
            raise self.step_failure
        tokens: list[int] = []
        while len(tokens) < min(n_max, self.width) and END not in tokens:
            tokens.append(sampler.sample(None))
        return tokens

    def report(self) -> dict[str, Any]:
        return {
            "error_budget": 0.0,
            "method": "s2moe",
            "n_steps": len(self.steps),
            "disabled_detail": self.detail,
        }


class FakeModel:
    """`kv_tokens` as of Model; tokens are code points."""

    library = handle = context = experts = None
    n_ctx = 64
    n_batch = 16

    def __init__(
        self,
        speculator: FakeSpeculator | None = None,
        asked: Speculation = Speculation(),  # noqa: B008
        *,
        is_possible: bool = True,
    ) -> None:
        self.speculator = speculator
        self.speculation = SpeculationSupport(asked, is_possible=is_possible)
        self.abort = FakeSwitch()
        self.chat_template = FakeTemplate()
        self.kv_tokens: list[int] = []
        self.n_decodes = 0

    def min_token_count(self, _n_bytes: int) -> int:
        return 0

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return chr(token).encode()

    def is_end(self, token: int) -> bool:
        return token == END

    def reuse_prefix(self, _prompt: list[int], *, exact: bool) -> int:
        self.kv_tokens.clear()
        return 0

    def decode(self, tokens: list[int]) -> None:
        self._check_abort()
        self.n_decodes += 1
        self.kv_tokens += tokens

    def speculate(
        self,
        speculator: FakeSpeculator,
        sampler: FakeSampler,
        root: int,
        n_max: int,
        *,
        keeps_bits: bool,
    ) -> list[int]:
        self._check_abort()
        tokens = speculator.step(sampler, root, len(self.kv_tokens), n_max)
        self.kv_tokens += [root, *tokens[:-1]]
        return tokens

    def _check_abort(self) -> None:
        if self.abort.requested:
            raise RequestAbortedError
