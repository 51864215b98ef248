"""`POST /tokenize`, `/detokenize`, `/apply-template` and `/v1/chat/completions/input_tokens`: what the model
would read, without an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from s2moe.engine.messages import ApplyTemplate, Detokenize, Detokenized, Rendered, Tokenize, Tokenized
from s2moe.server.answering import Answering
from s2moe.server.api.body import read_model
from s2moe.server.asking import Asking, new_query_id
from s2moe.server.chat_job import chat_wire, check_model
from s2moe.server.openapi import request_body
from s2moe.server.schema.chat import ChatRequest
from s2moe.server.schema.error import error_responses
from s2moe.server.schema.tokenize import (
    Detokenization,
    DetokenizeRequest,
    InputTokens,
    RenderedPrompt,
    TokenizeRequest,
    Tokens,
)
from s2moe.server.token_ids import check_token_ids

Handler = Callable[[Request], Awaitable[Response]]


def router(answering: Answering, asking: Asking) -> APIRouter:
    routes = APIRouter()

    async def tokenize(request: Request) -> Response:
        body = await read_model(request, TokenizeRequest)
        query = Tokenize(
            query_id=new_query_id(),
            text=body.content,
            add_special=body.add_special is True,
            parse_special=body.parse_special is not False,
        )
        reply = await asking.ask(request, query, Tokenized)
        return _json({"tokens": _pieces(reply) if body.with_pieces else reply.tokens})

    async def detokenize(request: Request) -> Response:
        body = await read_model(request, DetokenizeRequest)
        check_token_ids(body.tokens, answering.client.model, "tokens")
        query = Detokenize(query_id=new_query_id(), tokens=body.tokens)
        reply = await asking.ask(request, query, Detokenized)
        return _json({"content": reply.text.decode(errors="replace")})

    async def render(request: Request) -> Rendered:
        body = await read_model(request, ChatRequest)
        check_model(answering, body.model)
        messages_json, options_json = chat_wire(answering, body)
        query = ApplyTemplate(
            query_id=new_query_id(), messages_json=messages_json, chat_options_json=options_json
        )
        return await asking.ask(request, query, Rendered)

    async def apply_template(request: Request) -> Response:
        return _json({"prompt": (await render(request)).prompt})

    async def count(request: Request) -> Response:
        tokens = (await render(request)).n_tokens
        return _json({"object": "response.input_tokens", "input_tokens": tokens})

    def add(
        path: str, handler: Handler, body: type[BaseModel], answer: type[BaseModel], summary: str
    ) -> None:
        for each, shown in ((path, True), (_other(path), False)):
            routes.add_api_route(
                each,
                handler,
                methods=["POST"],
                summary=summary,
                response_model=answer,
                responses=error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503, 504),
                openapi_extra=request_body(body),
                include_in_schema=shown,
            )

    add("/tokenize", tokenize, TokenizeRequest, Tokens, "Tokens of a text")
    add("/detokenize", detokenize, DetokenizeRequest, Detokenization, "Text of tokens")
    add("/apply-template", apply_template, ChatRequest, RenderedPrompt, "Prompt of a conversation")
    path = "/v1/chat/completions/input_tokens"
    add(path, count, ChatRequest, InputTokens, "Number of prompt tokens of a conversation")
    return routes


def _other(path: str) -> str:
    """The same route with or without `/v1`."""
    return path.removeprefix("/v1") if path.startswith("/v1/") else f"/v1{path}"


def _pieces(reply: Tokenized) -> list[dict[str, Any]]:
    return [
        {"id": token, "piece": _piece(piece)} for token, piece in zip(reply.tokens, reply.pieces, strict=True)
    ]


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
