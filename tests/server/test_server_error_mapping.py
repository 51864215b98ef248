"""What becomes of the engine's errors, and how fields are named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from fake_engine import FakeEngine
from pydantic import BaseModel, ValidationError
from server_rig import ServerRig, StartServer, chat
from test_server_errors import assert_error, assert_invalid

from s2moe.engine.messages import MAX_FRAME_BYTES, Failed, Query, QueryReply
from s2moe.server.app import BODY_MODELS
from s2moe.server.engine_client import EngineState, EngineStoppingError, TooLongForEngineError
from s2moe.server.errors import format_param, from_failed, to_api_error


@pytest.mark.parametrize(
    "code",
    [
        "context_length_exceeded",
        "invalid_grammar",
        "invalid_schema",
        "invalid_value",
        "template_error",
        "unsupported",
    ],
)
def test_what_the_client_can_mend_is_a_400(code: str) -> None:
    error = from_failed(Failed(request_id="r", code=code, message="m", param="p"), generation_began=False)
    assert (error.status, error.type, error.code, error.param) == (400, "invalid_request_error", code, "p")


@pytest.mark.parametrize("began", [False, True])
async def test_code_that_the_server_does_not_know_is_not_the_clients_fault(began: bool) -> None:
    error = from_failed(Failed(request_id="r", code="disk_on_fire", message="m"), generation_began=began)
    assert (error.status, error.type, error.code) == (500, "server_error", "disk_on_fire")
    assert error.headers == ({"x-should-retry": "false"} if began else {})


def test_words_by_which_clients_know_an_overflow_are_the_engines_if_it_has_them() -> None:
    own = "This model's maximum context length is 512 tokens, but an input has 600. Raise --batch-size."
    for message, shown in ((own, own), ("too long", "maximum context length is 512 tokens")):
        failed = Failed(
            request_id="r",
            code="context_length_exceeded",
            message=message,
            n_prompt_tokens=600,
            n_ctx=512,
        )
        error = from_failed(failed, generation_began=False)
        assert shown in error.message
        assert error.extra == {"n_prompt_tokens": 600, "n_ctx": 512}


def test_engine_that_is_being_stopped_is_a_server_that_ends() -> None:
    error = to_api_error(EngineStoppingError("The server is shutting down.", EngineState.READY))
    assert (error.status, error.code) == (503, "draining")
    assert "Retry-After" in error.headers


async def test_what_the_wire_cannot_take_is_a_413(start_server: StartServer) -> None:
    too_long = TooLongForEngineError("The request is too long for the engine.", MAX_FRAME_BYTES)

    class Narrow(FakeEngine):
        async def ask(self, query: Query) -> QueryReply:
            raise too_long

    rig = await start_server(Narrow(lambda _: [too_long]))
    tokenize = await rig.http.post("/tokenize", json={"content": "x"})
    for reply in (await rig.post(chat()), await rig.post(chat(stream=True)), tokenize):
        text = assert_error(reply, 413, "invalid_request_error", "request_too_large")
        assert str(MAX_FRAME_BYTES) in text


ODD_VALUES: tuple[Any, ...] = (
    *(5, -5, 1.5, True, "", "x", [], {}, [5], ["x"], [[]], [{}], [None], [True]),
    *({"a": 5}, {"type": 5}, {"type": "x"}, {"type": "function"}, {"type": "function", "name": 5}),
    *({"type": "function", "function": {"name": 5}}, [{"type": 5}], [{"type": "text"}], [{"role": "user"}]),
    *([{"role": "user", "content": 5}], [{"role": "user", "content": [5]}]),
    *([["x"]], [[[5]]], {"a": {"a": 5}}),
)
TYPE_NAMES = {"str", "int", "float", "bool", "list", "dict", "none", "any", "literal"}


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """`annotation`, and whatever models are parts of it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_of(field.annotation)
    for part in get_args(annotation):
        yield from models_of(part)


MODELS = {each.__name__: each for body in BODY_MODELS for each in models_of(body)}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_param_is_made_of_names_of_fields(model: type[BaseModel]) -> None:
    """pydantic would put the name of a union's member behind that of the field."""
    for name, field in model.model_fields.items():
        for value in ODD_VALUES:
            try:
                model.model_validate({field.alias or name: value})
            except ValidationError as error:
                for each in error.errors():
                    names = [part for part in each["loc"] if isinstance(part, str)]
                    shown = format_param(each["loc"])
                    assert all(re.fullmatch("[a-z_0-9]+", part) for part in names), shown
                    assert not TYPE_NAMES & set(names), shown


@pytest.mark.parametrize("value", [5, "conv_1", {"id": "conv_1"}, [], True])
async def test_conversation_is_named_whatever_it_is(rig: ServerRig, value: object) -> None:
    reply = await rig.http.post("/v1/responses", json={"input": "x", "conversation": value})
    assert "stores no conversations" in assert_invalid(reply, "invalid_value", "conversation")
