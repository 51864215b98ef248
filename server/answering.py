"""What all generating endpoints share: from the engine's requests to an HTTP answer, streamed or whole.

An endpoint turns its body into a `Job`, and gives an `AnswerEncoder` for a stream or an `AnswerBuilder` for a
whole answer; both see the same events. Queueing, early failures, pings, cancelling and accounts happen here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec
from fastapi import Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from s2moe.engine.messages import Finished, Generate, GenerationEvent, PrefillProgress, Started, Step
from s2moe.server.admission import Admission
from s2moe.server.direct_send import DirectSend
from s2moe.server.disconnect import until_gone
from s2moe.server.engine_client import EngineClient
from s2moe.server.errors import ApiError, ClientGoneError, ErrorReply, to_api_error, to_reply
from s2moe.server.generation import Generation
from s2moe.server.metrics import Metrics
from s2moe.server.middleware import BODY_SEND_KEY
from s2moe.server.recorder import RequestRecorder
from s2moe.server.settings import Settings
from s2moe.server.stream.sse import named_event

FIRST_EVENT_WAIT_SECONDS = 1.5
"""How long a stream may stay without a status line. Within it an early failure keeps its HTTP status;
after it, the client sees 200 and keep-alive comments, and a failure arrives as an error event."""
PING = b": ping\n\n"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What one HTTP request wants of the engine."""

    api: str
    """Label of the metrics: chat, completions, responses, messages."""
    requests: Sequence[Generate]
    """One for each choice, answered in this order under one place in the queue."""


class AnswerEncoder(Protocol):
    """Events of one stream as bytes; each method returns whole SSE events, or b"". Made once the model is
    known, and sees each event once.

    start(), then for each choice progress()*, feed()*, finish_choice(); then finish(). A failure takes the
    place of the rest.
    """

    def start(self) -> bytes: ...

    def progress(self, event: Started | PrefillProgress) -> bytes: ...

    def feed(self, step: Step) -> bytes: ...

    def finish_choice(self, event: Finished) -> bytes: ...

    def finish(self) -> bytes: ...

    def fail(self, reply: ErrorReply) -> bytes: ...


class AnswerBuilder(Protocol):
    """Events of one answer as a JSON object: for each choice feed()* and finish_choice(), then finish()."""

    def feed(self, step: Step) -> None: ...

    def finish_choice(self, event: Finished) -> None: ...

    def finish(self) -> dict[str, Any]: ...


class Answering:
    """Runs jobs. Made once for the application, used by all routers."""

    def __init__(
        self, settings: Settings, client: EngineClient, metrics: Metrics, admission: Admission
    ) -> None:
        self.settings = settings
        self.client = client
        self.alias = settings.model_alias
        self._metrics = metrics
        self._admission = admission

    @property
    def fingerprint(self) -> str:
        return self.client.model.system_fingerprint if self.client.model is not None else ""

    def refuse(self, request: Request, api: str, *, stream: bool, error: ApiError) -> ApiError:
        """Accounts for a request that fails, or whose client leaves, before it is queued; returns the error,
        to be raised."""
        recorder = self._recorder(request, api, stream=stream)
        if isinstance(error, ClientGoneError):
            recorder.cancelled("disconnect", 0.0)
        else:
            recorder.failed(error)
        return error

    async def stream(self, request: Request, job: Job, make_encoder: Callable[[], AnswerEncoder]) -> Response:
        """Raises ApiError while the status line is still open."""
        generation = self._start(request, job, stream=True)
        first: GenerationEvent | None = None
        try:
            first = await until_gone(
                request.receive, generation.next_event(), timeout_seconds=FIRST_EVENT_WAIT_SECONDS
            )
        except TimeoutError:
            pass
        except BaseException:
            generation.cancel("disconnect")
            raise

        def encoder() -> AnswerEncoder:
            made = make_encoder()

            def write(step: Step) -> bool:
                if not response.is_free:  # asked first: an encoder sees each step once
                    return False
                try:
                    response.write_directly(made.feed(step))
                except Exception as error:  # not into the engine's socket, which is not to blame
                    _fail(generation, error)
                return True

            generation.send_directly(write)
            return made

        chunks = _chunks(generation, first, encoder, len(job.requests))
        response = GenerationStream(chunks, generation, ping_seconds=self.settings.ping_interval)
        return response

    async def whole(self, request: Request, job: Job, builder: AnswerBuilder) -> Response:
        """Raises ApiError."""
        generation = self._start(request, job, stream=False)

        async def collect() -> bytes:
            n_open = len(job.requests)
            while n_open:
                event = await generation.next_event()
                if isinstance(event, Step):
                    builder.feed(event)
                elif isinstance(event, Finished):
                    builder.finish_choice(event)
                    n_open -= 1
            return msgspec.json.encode(builder.finish())

        async def collect_or_fail() -> bytes:
            try:
                return await collect()
            except Exception as error:
                if isinstance(error, ApiError):
                    raise
                raise _fail(generation, error) from None

        try:
            # inside of until_gone: some turns later the end would have been counted as a success
            answer = await until_gone(request.receive, collect_or_fail())
        finally:
            generation.cancel("disconnect")
        return Response(answer, media_type="application/json")

    def _start(self, request: Request, job: Job, *, stream: bool) -> Generation:
        recorder = self._recorder(request, job.api, stream=stream)
        return Generation(
            self.client,
            self._admission,
            recorder,
            job.requests,
            timeout_seconds=self.settings.request_timeout,
        )

    def _recorder(self, request: Request, api: str, *, stream: bool) -> RequestRecorder:
        recorder = RequestRecorder(self._metrics, model=self.alias, api=api, stream=stream)
        request.state.recorder = recorder
        return recorder


class GenerationStream(EventSourceResponse):
    """An SSE response that never leaves its generation running, however it ends: also when the client
    leaves before the first chunk is asked for, where the chunk iterator's own cleanup would not run.

    A token's chunk is written from the callback that received the token, past the tasks of the response.
    """

    def __init__(self, chunks: AsyncIterator[bytes], generation: Generation, *, ping_seconds: float) -> None:
        super().__init__(
            chunks,
            ping=ping_seconds,
            sep="\n",
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
            headers={"Cache-Control": "no-cache"},
        )
        self._generation = generation
        self._direct: DirectSend | None = None

    @property
    def is_free(self) -> bool:
        """Whether a chunk may be written directly: no older one is on its way."""
        return self._direct is not None and self._direct.is_free

    def write_directly(self, chunk: bytes) -> None:
        """Writes a chunk now; only while `is_free`. Called on the event loop."""
        if chunk and self._direct is not None:
            self._direct(_body(chunk))

    async def _stream_response(self, send: Send) -> None:
        """The base class's loop without what it does per chunk (a timeout scope, a log call, a conversion),
        which cost more than encoding the chunk. A client that does not read is noticed by its disconnect."""
        assert self._direct is not None
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self.body_iterator:
            await self._direct.settled()
            await self._body_send(_body(cast("bytes", chunk)))
        async with self._send_lock:
            self.active = False
            await self._direct.settled()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._body_send: Send = scope.get(BODY_SEND_KEY, send)
        self._direct = DirectSend(self._body_send)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._direct.close()
            self._direct = None
            self._generation.cancel("disconnect")


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


async def _chunks(
    generation: Generation,
    first: GenerationEvent | None,
    make_encoder: Callable[[], AnswerEncoder],
    n_choices: int,
) -> AsyncIterator[bytes]:
    """The events of one stream as bytes. `first` was awaited already; None = it has not come in time.

    The encoder is made after the first event, when the model is surely known.
    """
    if first is None:
        yield PING
    encoder: AnswerEncoder | None = None
    try:
        event = first if first is not None else await generation.next_event()
        encoder = make_encoder()
        if data := encoder.start():
            yield data
        while True:
            data = b""
            if isinstance(event, Step):
                data = encoder.feed(event)
            elif isinstance(event, Started | PrefillProgress):
                data = encoder.progress(event)
            elif isinstance(event, Finished):
                data = encoder.finish_choice(event)
                n_choices -= 1
                if n_choices == 0:
                    yield data + encoder.finish()
                    return
            if data:
                yield data
            event = await generation.next_event()
    except Exception as error:
        if not isinstance(error, ApiError):
            _fail(generation, error)
        yield _error_event(encoder, make_encoder, to_reply(error))


def _error_event(
    encoder: AnswerEncoder | None, make_encoder: Callable[[], AnswerEncoder], reply: ErrorReply
) -> bytes:
    """The end of a stream that failed, also where it did so because the encoder cannot be made or used."""
    try:
        return (encoder or make_encoder()).fail(reply)
    except Exception as error:
        _log.error("an error could not be written as the protocol has it", exc_info=error)
        return named_event("error", reply.body)


def _fail(generation: Generation, error: Exception) -> ApiError:
    _log.error("an answer could not be written", exc_info=error)
    api_error = to_api_error(error)
    generation.fail(api_error)
    return api_error
