"""A model without a library: it goes on with the letters of a text, its speculator with several at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fake_vocabulary import END, FakeVocabulary

from s2moe.engine.errors import RequestAbortedError
from s2moe.engine.messages import Speculation
from s2moe.engine.native import NativeError
from s2moe.engine.speculation import SpeculationSupport


class FakeSwitch:
    requested = False


class FakeTemplate:
    """Contents one behind the other; `chat` is what else it answers."""

    def __init__(self) -> None:
        self.chat: dict[str, Any] = {}
        self.requests: list[dict[str, Any]] = []
        self.failure: NativeError | None = None

    def apply(self, request_json: bytes) -> bytes:
        request = json.loads(request_json)
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        prompt = "".join(message.get("content") or "" for message in request["messages"])
        plain = {"prompt": prompt, "format": "content-only", "stops": [], "preserved_tokens": []}
        return json.dumps({**plain, **self.chat}).encode()


class FakeLibrary:
    """Logits of which the row that chose a token can be seen."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.failure: NativeError | None = None

    def logprobs(
        self, _context: object, row: int, token: int, n_top: int
    ) -> tuple[float, list[tuple[int, float]]]:
        if self.failure is not None:
            raise self.failure
        self.rows.append(row)
        return -token / 1000, [(ord("a") + i, -i / 10) for i in range(n_top)]


class FakeSampler:
    """Chooses the next of given tokens, whatever the model says, and then the end."""

    def __init__(self, tokens: str | Sequence[int]) -> None:
        self.tokens = [ord(each) if isinstance(each, str) else each for each in tokens]
        self.n_chosen = 0
        self.failure: NativeError | None = None
        self.prompt: list[int] = []

    def sample(self, _context: object) -> int:
        if self.failure is not None:
            raise self.failure
        self.n_chosen += 1
        return self.tokens[self.n_chosen - 1] if self.n_chosen <= len(self.tokens) else END

    def accept_prompt(self, tokens: list[int]) -> None:
        self.prompt = list(tokens)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class FakeRow:
    logits_index: int


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
        self.n_rows = 0
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
        self.n_rows = len(tokens)
        return tokens

    def rows(self) -> list[FakeRow]:
        """As if every other draft had been rejected."""
        return [FakeRow(2 * i) for i in range(self.n_rows)]

    def report(self) -> dict[str, Any]:
        return {
            "error_budget": 0.0,
            "method": "s2moe",
            "n_steps": len(self.steps),
            "disabled_detail": self.detail,
        }


class FakeModel:
    """`kv_tokens` as of Model; tokens are code points."""

    handle = context = experts = None
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
        self.library = FakeLibrary()
        self.vocabulary = FakeVocabulary()
        self.chat_template = FakeTemplate()
        self.kv_tokens: list[int] = []
        self.n_decodes = 0

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
        is_retried: bool,
        keeps_bits: bool,
    ) -> list[int]:
        self._check_abort()
        tokens = speculator.step(sampler, root, len(self.kv_tokens), n_max)
        self.kv_tokens += [root, *tokens[:-1]]
        return tokens

    def _check_abort(self) -> None:
        if self.abort.requested:
            raise RequestAbortedError
