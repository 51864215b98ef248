"""`POST /v1/chat/completions`, streamed and whole."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import msgspec
from fastapi import APIRouter, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from s2moe.engine.messages import (
    Finished,
    Generate,
    GenerationEvent,
    ModelInfo,
    Sampling,
    Speculation,
    Step,
)
from s2moe.server.admission import Admission
from s2moe.server.api.body import read_model
from s2moe.server.direct_send import DirectSend
from s2moe.server.disconnect import until_gone
from s2moe.server.engine_client import EngineClient
from s2moe.server.errors import ApiError, InvalidRequestError, NotFoundError, to_reply
from s2moe.server.generation import Generation
from s2moe.server.metrics import Metrics
from s2moe.server.middleware import BODY_SEND_KEY
from s2moe.server.recorder import RequestRecorder
from s2moe.server.schema.chat import ChatCompletion, ChatRequest
from s2moe.server.schema.error import error_responses
from s2moe.server.schema.s2moe_options import S2moeOptions
from s2moe.server.settings import Settings
from s2moe.server.stream.chat_chunks import PING, ChatChunkEncoder, error_event
from s2moe.server.stream.chat_completion import ChatCompletionBuilder

FIRST_EVENT_WAIT_SECONDS = 1.5
"""How long a stream may stay without a status line. Within it an early failure keeps its HTTP status;
after it, the client sees 200 and keep-alive comments, and a failure arrives as an error event."""

_log = logging.getLogger(__name__)


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

    def write_directly(self, chunk: bytes) -> bool:
        """Writes a chunk now, unless older ones are on their way (False). Called on the event loop."""
        if self._direct is None or not self._direct.is_free:
            return False
        if chunk:
            self._direct(_body(chunk))
        return True

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


def router(settings: Settings, client: EngineClient, metrics: Metrics, admission: Admission) -> APIRouter:
    routes = APIRouter()
    alias = settings.model_alias

    def start(request: Request, generate: Generate, *, stream: bool) -> Generation:
        recorder = RequestRecorder(metrics, model=alias, api="chat", stream=stream)
        request.state.recorder = recorder
        return Generation(client, admission, recorder, generate)

    async def stream(request: Request, generate: Generate, *, include_usage: bool) -> Response:
        created = int(time.time())
        generation = start(request, generate, stream=True)
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

        def encoder() -> ChatChunkEncoder:
            made = ChatChunkEncoder(
                completion_id=completion_id(),
                created=created,
                model=alias,
                system_fingerprint=fingerprint(client),
                include_usage=include_usage,
            )
            generation.send_directly(lambda step: response.write_directly(made.feed(step)))
            return made

        chunks = _chunks(generation, first, encoder)
        response = GenerationStream(chunks, generation, ping_seconds=settings.ping_interval)
        return response

    async def whole(request: Request, generate: Generate) -> Response:
        answer = ChatCompletionBuilder(completion_id=completion_id(), created=int(time.time()), model=alias)
        generation = start(request, generate, stream=False)

        async def collect() -> Finished:
            while True:
                event = await generation.next_event()
                if isinstance(event, Step):
                    answer.feed(event)
                elif isinstance(event, Finished):
                    return event

        try:
            finished = await until_gone(request.receive, collect())
        finally:
            generation.cancel("disconnect")
        return Response(
            msgspec.json.encode(answer.finish(finished, system_fingerprint=fingerprint(client))),
            media_type="application/json",
        )

    async def create(request: Request) -> Response:
        body = await read_model(request, ChatRequest)
        if (problem := body.unsupported_field()) is not None:
            param, message = problem
            raise InvalidRequestError(f"Invalid value for `{param}`: {message}.", param=param)
        if settings.strict_model and body.model not in (None, alias):
            raise NotFoundError(
                f"The model `{body.model}` is not served here; this server has `{alias}`.",
                code="model_not_found",
                param="model",
            )
        if settings.log_prompts:
            messages = [message.to_wire() for message in body.messages]
            _log.info("chat request", extra={"fields": {"messages": messages}})
        if (error := too_long(body, client.model)) is not None:
            recorder = RequestRecorder(metrics, model=alias, api="chat", stream=bool(body.stream))
            request.state.recorder = recorder
            recorder.failed(error)
            raise error
        generate, streamed, include_usage = to_generate(body), bool(body.stream), body.wants_usage_chunk
        del body  # may be long, and what follows may wait
        if streamed:
            return await stream(request, generate, include_usage=include_usage)
        return await whole(request, generate)

    for path, shown in (("/v1/chat/completions", True), ("/chat/completions", False)):
        routes.add_api_route(
            path,
            create,
            methods=["POST"],
            summary="Answer a conversation",
            response_model=ChatCompletion,
            responses=error_responses(400, 401, 404, 413, 429, 500, 503)
            | {200: {"content": {"text/event-stream": {}}, "description": "The answer, or its chunks"}},
            openapi_extra={"requestBody": _REQUEST_BODY},
            include_in_schema=shown,
        )
    return routes


_REQUEST_BODY: dict[str, Any] = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ChatRequest"}}},
}


async def _chunks(
    generation: Generation, first: GenerationEvent | None, make_encoder: Callable[[], ChatChunkEncoder]
) -> AsyncIterator[bytes]:
    """The events of one stream as bytes. `first` was awaited already; None = it has not come in time.

    The encoder is made after the first event, when the model is surely known.
    """
    if first is None:
        yield PING
    encoder: ChatChunkEncoder | None = None
    try:
        event = first if first is not None else await generation.next_event()
        encoder = make_encoder()
        yield encoder.start()
        while not isinstance(event, Finished):
            if isinstance(event, Step) and (data := encoder.feed(event)):
                yield data
            event = await generation.next_event()
        yield encoder.finish(event)
    except ApiError as error:
        yield error_event(to_reply(error))


def too_long(body: ChatRequest, model: ModelInfo | None) -> ApiError | None:
    """The error for messages that do not fit the context even in the longest tokens. The engine would say the
    same, but until then they would take memory in the queue."""
    if model is None or not model.longest_piece_bytes:
        return None
    n_bytes = sum(len(message.to_wire()["content"].encode()) for message in body.messages)
    n_tokens = n_bytes // model.longest_piece_bytes
    if n_tokens < model.n_ctx:
        return None
    message = (
        f"This model's maximum context length is {model.n_ctx} tokens, but the messages have at least "
        f"{n_tokens} tokens. Shorten them or serve with a larger --ctx-size."
    )
    return InvalidRequestError(
        message,
        code="context_length_exceeded",
        param="messages",
        extra={"n_prompt_tokens": n_tokens, "n_ctx": model.n_ctx},
    )


def to_generate(body: ChatRequest) -> Generate:
    """The engine's form of the request. Its id is ours, not the client's, so that it is unique."""
    seed = None if body.seed is None else body.seed % 2**32
    return Generate(
        request_id=uuid.uuid4().hex,
        messages_json=msgspec.json.encode([message.to_wire() for message in body.messages]),
        sampling=Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            seed=seed,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repeat_penalty=body.repeat_penalty,
            logit_bias=body.logit_bias or {},
            grammar=body.grammar or None,
        ),
        max_tokens=body.token_limit,
        stop=body.stop_strings,
        speculation=to_speculation(body.s2moe),
    )


def to_speculation(options: S2moeOptions | None) -> Speculation:
    """The engine's form of the request field `s2moe`."""
    if options is None:
        return Speculation()
    return Speculation(
        method=options.speculation,
        preset=options.preset,
        exact=options.exact,
        draft_experts=options.draft_experts,
        max_nodes=options.max_nodes,
        reuse_strength=options.reuse_strength,
        reuse_cap=options.reuse_cap,
        error_budget=options.error_budget,
        single_token_bias=options.single_token_bias,
        adaptive=options.adaptive,
        reuse_gating=options.reuse_gating,
        shared_context=options.shared_context,
    )


def completion_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def fingerprint(client: EngineClient) -> str:
    return client.model.system_fingerprint if client.model is not None else ""
