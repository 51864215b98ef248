"""What endpoints do alike whose requests are turned into chat requests."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastapi import Request, Response

from s2moe.engine.messages import ApplyTemplate, Rendered
from s2moe.server.answering import AnswerBuilder, AnswerEncoder, Answering, Job
from s2moe.server.asking import Asking, new_query_id
from s2moe.server.chat_job import chat_job, chat_wire, check_model
from s2moe.server.convert.chat_form import ChatForm
from s2moe.server.convert.field_names import FieldNames
from s2moe.server.engine_client import EngineError
from s2moe.server.errors import ApiError, to_api_error
from s2moe.server.logs import fit_for_log

_log = logging.getLogger(__name__)


def job_of(answering: Answering, request: Request, form: ChatForm, api: str, *, stream: bool) -> Job:
    """Raises ApiError that names the client's field, after having accounted for it."""
    if form.skipped_tools:
        kinds = [fit_for_log(kind) for kind in form.skipped_tools[:8]]
        _log.debug("tools that the server cannot run were left out", extra={"fields": {"types": kinds}})
    try:
        return chat_job(answering, form.request(), api)
    except ApiError as error:
        error = form.names.translate(error)
        raise answering.refuse(request, api, stream=stream, error=error) from None


async def answer(
    answering: Answering,
    request: Request,
    job: Job,
    names: FieldNames,
    *,
    builder: AnswerBuilder | None,
    make_encoder: Callable[[], AnswerEncoder],
) -> Response:
    """A whole answer if there is a builder, else a stream. Raises ApiError that names the client's field."""
    try:
        if builder is not None:
            return await answering.whole(request, job, builder)
        return await answering.stream(request, job, make_encoder)
    except ApiError as error:
        raise names.translate(error) from None


async def count_tokens(answering: Answering, asking: Asking, request: Request, form: ChatForm) -> int:
    """How many tokens the prompt has. Raises ApiError that names the client's field."""
    try:
        body = form.request()
        check_model(answering, body.model)
        messages_json, options_json = chat_wire(answering, body)
        query = ApplyTemplate(
            query_id=new_query_id(), messages_json=messages_json, chat_options_json=options_json
        )
        return (await asking.ask(request, query, Rendered)).n_tokens
    except (ApiError, EngineError) as error:
        raise form.names.translate(to_api_error(error)) from None
