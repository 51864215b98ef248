"""An engine that plays a script: it implements `EngineClient` without a process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from s2moe.engine.messages import (
    ApplyTemplate,
    Detokenize,
    Detokenized,
    Failed,
    Finished,
    Generate,
    GenerationEvent,
    ModelInfo,
    Plan,
    Query,
    QueryFailed,
    QueryReply,
    Rendered,
    ServingDevice,
    SpeculationReport,
    Started,
    Step,
    Timings,
    Tokenize,
    Tokenized,
)
from s2moe.server.engine_client import (
    EngineObserver,
    EngineState,
    EngineUnavailableError,
    EventSink,
    QueryError,
)

MODEL = ModelInfo(
    architecture="llama",
    name="Fake",
    quantization="Q4_0",
    size_bytes=770_000_000,
    n_params=1_300_000_000,
    n_ctx=4096,
    n_ctx_train=8192,
    n_layer=30,
    n_vocab=49152,
    n_expert=16,
    n_expert_used=4,
    system_fingerprint="b1234-abcdef-p1",
    devices=[ServingDevice(kind="cpu", name="Fake CPU")],
)

Action = GenerationEvent | float | asyncio.Event | Exception
"""What a script does next: yield an event, sleep for seconds, wait for an event, raise."""
Script = Callable[[Generate], Sequence[Action]]


def started(request: Generate, *, prompt: int = 10, cached: int = 0) -> Started:
    return Started(request_id=request.request_id, n_prompt_tokens=prompt, n_cached_tokens=cached)


def step(request: Generate, content: str = "", *, reasoning: str = "", n_tokens: int = 1) -> Step:
    return Step(request_id=request.request_id, content=content, reasoning=reasoning, n_tokens=n_tokens)


def finished(
    request: Generate,
    reason: str = "stop",
    *,
    prompt: int = 10,
    cached: int = 0,
    tokens: int = 2,
    reasoning_tokens: int = 0,
    speculation: SpeculationReport | None = None,
) -> Finished:
    return Finished(
        request_id=request.request_id,
        reason=reason,
        n_prompt_tokens=prompt,
        n_cached_tokens=cached,
        n_completion_tokens=tokens,
        n_reasoning_tokens=reasoning_tokens,
        timings=Timings(
            prefill_seconds=0.5, decode_seconds=0.25, n_decode_steps=tokens, speculation=speculation
        ),
    )


def hello(request: Generate) -> Sequence[Action]:
    """The default script: two tokens."""
    return [started(request), step(request, "Hel"), step(request, "lo"), finished(request)]


def endless(request: Generate) -> Sequence[Action]:
    """Decodes slowly and does not end within a test."""
    return [started(request), *(each for _ in range(3000) for each in (step(request, "x"), 0.02))]


def endless_prefill(request: Generate) -> Sequence[Action]:
    return [started(request), 60.0]


def last_text(request: Generate) -> str:
    """The content of the last message, by which tests tell requests apart."""
    if not request.messages_json:
        return request.prompt or ""
    return str(json.loads(request.messages_json)[-1]["content"])


def byte_tokens(query: Query) -> QueryReply:
    match query:
        case Tokenize():
            data = query.text.encode()
            return Tokenized(query_id=query.query_id, tokens=list(data), pieces=[bytes([b]) for b in data])
        case Detokenize():
            return Detokenized(query_id=query.query_id, text=bytes(token % 256 for token in query.tokens))
        case ApplyTemplate():
            messages = json.loads(query.messages_json)
            prompt = "".join(f"{each['role']}: {each['content']}\n" for each in messages)
            return Rendered(query_id=query.query_id, prompt=prompt, n_tokens=len(prompt.encode()))
        case _:
            return QueryFailed(query_id=query.query_id, code="unsupported", message="no embeddings here")


async def until(condition: Callable[[], bool], *, seconds: float = 5) -> None:
    """Polls, because what tests wait for has no event of its own. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass
class FakeEngine:
    """Plays `script` for each request and keeps a diary."""

    script: Script = hello
    state: EngineState = EngineState.READY
    state_detail: str = ""
    model: ModelInfo | None = MODEL
    plan: Plan | None = None
    heartbeat_age_seconds: float = 0.25
    abort_seconds: float = 0.0
    report_of_aborted: SpeculationReport | None = None
    """What the end of an aborted request carries, which only `observer` sees."""
    observer: EngineObserver | None = None
    requests: list[Generate] = field(default_factory=list)
    aborted_at: dict[str, float] = field(default_factory=dict)
    """Text of the last message → monotonic time at which the abort reached the engine."""
    completed: list[str] = field(default_factory=list)
    overlaps: int = 0
    unavailable_times: int = 0
    """So many calls of `run` find the engine just gone, though it was said to be ready."""
    running: str | None = None
    answer: Callable[[Query], QueryReply] | None = None
    """How queries are answered; None = a token per byte, messages one per line, and no embeddings."""
    queries: list[Query] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set_state(self, state: EngineState, detail: str = "") -> None:
        self.state, self.state_detail = state, detail
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_ready(self) -> None:
        while self.state is not EngineState.READY:
            if self.state is EngineState.DEAD:
                raise EngineUnavailableError("the engine has stopped for good", self.state)
            await self._changed.wait()

    async def wait_answering(self) -> None:
        await self.wait_ready()

    async def run(self, request: Generate, sink: EventSink) -> None:
        if self.unavailable_times > 0:
            self.unavailable_times -= 1
            raise EngineUnavailableError("the engine has just gone", EngineState.RESTARTING)
        self.overlaps += self.running is not None
        text = last_text(request)
        self.running = text
        self.requests.append(request)
        try:
            for action in self.script(request):
                if isinstance(action, float):
                    await asyncio.sleep(action)
                elif isinstance(action, asyncio.Event):
                    await action.wait()
                elif isinstance(action, Exception):
                    raise action
                else:
                    sink(action)
                    if isinstance(action, Finished | Failed):
                        self._observe(action)
                    # The socket would give the event loop a turn, too.
                    await asyncio.sleep(0)
            self.completed.append(text)
        except asyncio.CancelledError:
            self.aborted_at[text] = time.monotonic()
            await asyncio.sleep(self.abort_seconds)
            if self.report_of_aborted is not None:
                timings = Timings(speculation=self.report_of_aborted)
                self._observe(Finished(request_id=request.request_id, reason="cancelled", timings=timings))
            raise
        finally:
            self.running = None

    async def ask(self, query: Query) -> QueryReply:
        if self.state not in (EngineState.READY, EngineState.BUSY):
            raise EngineUnavailableError("there is no engine", self.state)
        self.queries.append(query)
        await asyncio.sleep(0)
        reply = (self.answer or byte_tokens)(query)
        if isinstance(reply, QueryFailed):
            raise QueryError(reply)
        return reply

    def _observe(self, event: Finished | Failed) -> None:
        if self.observer is not None:
            self.observer.on_finished(event)

    async def until_running(self, text: str) -> None:
        await until(lambda: self.running == text)

    async def until_aborted(self, text: str) -> float:
        """Returns the monotonic time of the abort."""
        await until(lambda: text in self.aborted_at)
        return self.aborted_at[text]
