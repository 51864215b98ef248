"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import logging
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response

from s2moe.engine.messages import Embed, Embedded, ModelInfo
from s2moe.server.answering import Answering
from s2moe.server.api.body import read_model
from s2moe.server.asking import Asking, new_query_id
from s2moe.server.chat_job import check_model
from s2moe.server.engine_client import EngineError
from s2moe.server.errors import ApiError, ClientGoneError, InvalidRequestError, ServerError, to_api_error
from s2moe.server.metrics import Metrics
from s2moe.server.openapi import request_body
from s2moe.server.schema.embeddings import Embeddings, EmbeddingsRequest
from s2moe.server.schema.error import error_responses
from s2moe.server.schema.prompts import Prompt
from s2moe.server.token_ids import check_token_ids

API: Final = "embeddings"
INPUTS_PER_QUERY: Final = 32
"""A reply has to fit a frame of the wire, and only one of them is in memory as Python numbers."""
_log = logging.getLogger(__name__)


def router(answering: Answering, asking: Asking, metrics: Metrics) -> APIRouter:
    routes = APIRouter()

    async def create(request: Request) -> Response:
        body = await read_model(request, EmbeddingsRequest)
        check_model(answering, body.model)
        if answering.settings.log_prompts:
            _log.info("embeddings request", extra={"fields": {"input": body.input}})
        try:
            _check(body, answering.client.model)
            data = await asking.attend(request, _embed(body, asking))
        except ClientGoneError:
            metrics.requests.labels(answering.alias, API, "false", "cancelled").inc()
            raise
        except (ApiError, EngineError) as error:
            raise answering.refuse(request, API, stream=False, error=to_api_error(error)) from None
        metrics.requests.labels(answering.alias, API, "false", "stop").inc()
        return Response(
            b'{"object":"list","data":%b,"model":%b,"usage":%b}'
            % (data.vectors, msgspec.json.encode(answering.alias), msgspec.json.encode(data.usage)),
            media_type="application/json",
        )

    for path, shown in (("/v1/embeddings", True), ("/embeddings", False)):
        routes.add_api_route(
            path,
            create,
            methods=["POST"],
            summary="Vectors of texts",
            response_model=Embeddings,
            responses=error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503, 504),
            openapi_extra=request_body(EmbeddingsRequest),
            include_in_schema=shown,
        )
    return routes


def _check(body: EmbeddingsRequest, model: ModelInfo | None) -> None:
    """Raises InvalidRequestError for what this model cannot do."""
    if model is None:
        return
    if not model.gives_embeddings:
        raise InvalidRequestError(
            f"The model {model.name} gives no embeddings; serve a model that was made for them.",
            code="unsupported_model",
            param="model",
        )
    if body.dimensions is not None and body.dimensions != model.n_embd:
        raise InvalidRequestError(
            f"Invalid value for `dimensions`: the vectors of this model have {model.n_embd} elements and "
            "cannot be shortened; leave `dimensions` out.",
            param="dimensions",
        )
    for each in body.input:
        if not isinstance(each, str):
            check_token_ids(each, model, "input")


class _Data(NamedTuple):
    vectors: bytes
    """JSON array of the field `data`"""
    usage: dict[str, int]


async def _embed(body: EmbeddingsRequest, asking: Asking) -> _Data:
    is_base64 = body.encoding_format == "base64"
    parts: list[bytes] = []
    n_tokens = 0
    for begin in range(0, len(body.input), INPUTS_PER_QUERY):
        inputs = body.input[begin : begin + INPUTS_PER_QUERY]
        reply = await asking.reply(_to_query(inputs), Embedded)
        if len(reply.vectors) != len(inputs):
            raise ServerError("The engine gave another number of vectors.", code="engine_error")
        n_tokens += sum(reply.n_tokens)
        for index, vector in enumerate(_in_order(inputs, reply.vectors), begin):
            value = _base64(vector) if is_base64 else vector
            parts.append(msgspec.json.encode({"object": "embedding", "index": index, "embedding": value}))
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return _Data(b"[" + b",".join(parts) + b"]", usage)


def _to_query(inputs: Sequence[Prompt]) -> Embed:
    return Embed(
        query_id=new_query_id(),
        texts=[each for each in inputs if isinstance(each, str)],
        token_lists=[each for each in inputs if not isinstance(each, str)],
    )


def _in_order(inputs: Sequence[Prompt], vectors: Sequence[list[float]]) -> Iterator[list[float]]:
    """The vectors of texts come first, those of token lists behind them."""
    n_texts = sum(isinstance(each, str) for each in inputs)
    texts, tokens = iter(vectors[:n_texts]), iter(vectors[n_texts:])
    for each in inputs:
        yield next(texts) if isinstance(each, str) else next(tokens)


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
