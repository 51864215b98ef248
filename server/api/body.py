"""Request body → validated model, with one error shape for everything that can be wrong with it."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from s2moe.server.errors import ClientGoneError, InvalidRequestError, MediaTypeError, from_validation
from s2moe.server.logs import fit_for_log

_MOST_NAMES: Final = 16
_log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)


async def read_model(request: Request, model: type[Model]) -> Model:
    """Reads the JSON body whatever its Content-Type says (curl -d sends a form type by default).

    Raises ApiError for everything that is wrong with the body, ClientGoneError when the client leaves.
    """
    _check_media_type(request)
    # Not request.body(), which the request would keep until its answer has ended.
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
    except ClientDisconnect as error:
        raise ClientGoneError from error
    try:
        fields = parse_object(body)
        known = model.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None
    except RecursionError:
        raise InvalidRequestError("The request body is nested too deeply.", code="invalid_json") from None
    if _log.isEnabledFor(logging.DEBUG):
        _log_unknown(fields, model)
    return known


def _log_unknown(fields: Mapping[str, Any], model: type[BaseModel]) -> None:
    """Names only: a value may be a prompt."""
    known = {field.alias or name for name, field in model.model_fields.items()}
    unknown = [name for name in fields if name not in known]
    if unknown:
        names = [fit_for_log(name) for name in unknown[:_MOST_NAMES]]
        shown = {"names": names, "n_fields": len(unknown)}
        _log.debug("fields of the request were ignored: they are not known", extra={"fields": shown})


def _check_media_type(request: Request) -> None:
    # A web page may send other types to any server without asking for leave first (no CORS preflight), so
    # a browser, which is known by its Origin header, has to send JSON as JSON.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in request.headers and media_type != "application/json":
        raise MediaTypeError("Send the body with `Content-Type: application/json`.")


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Strict JSON: no NaN, no lone surrogates, UTF-8 only (a byte order mark is tolerated)."""
    if body.startswith(codecs.BOM_UTF8):
        body = body[len(codecs.BOM_UTF8) :]
    if not body or body.isspace():
        raise InvalidRequestError("The request body is empty; send a JSON object.", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"The request body is not valid JSON: {error}", code="invalid_json"
        ) from error
    if not isinstance(value, dict):
        raise InvalidRequestError("The request body is not a JSON object.", code="invalid_json")
    return value
