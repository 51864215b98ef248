"""Chat fields that decide what the engine does: formats, thinking, continuation, log probabilities."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_engine import MODEL, Action, FakeEngine, Generate, finished, started
from scripted_answers import answer_with_logprobs
from server_rig import ServerRig, StartServer, chat, chunks_of
from test_server_chat_tools import LOOK, options_of
from test_server_errors import assert_invalid

from s2moe.engine.messages import Failed, Step, TokenLogprob, TopLogprob

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def json_schema(schema: object = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | fields}


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
        (json_schema(), SCHEMA),
        (json_schema(strict=True, description="d"), SCHEMA),
        (json_schema(strict=False, name=None), SCHEMA),
        (json_schema({}), {}),
    ],
)
async def test_format_becomes_a_schema_of_the_content(
    rig: ServerRig, response_format: object, schema: object
) -> None:
    assert (await rig.post(chat(response_format=response_format))).status_code == 200
    options = options_of(rig)
    assert options.pop("strict_schema", False) is ("'strict': True" in str(response_format))
    assert options == ({} if schema is None else {"json_schema": schema})


async def test_format_goes_together_with_optional_tools(rig: ServerRig) -> None:
    assert (await rig.post(chat(response_format=json_schema(), tools=[LOOK]))).status_code == 200
    assert {"tools", "json_schema"} <= set(options_of(rig))


def deep(n_levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(n_levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"response_format": json_schema(True)}, "invalid_schema", "response_format.json_schema.schema"),
        ({"response_format": json_schema("x")}, "invalid_schema", "response_format.json_schema.schema"),
        ({"response_format": json_schema(deep(70))}, "invalid_schema", "response_format.json_schema.schema"),
        ({"response_format": json_schema({"title": "x" * 300_000})}, "invalid_schema", "response_format"),
        ({"response_format": json_schema(name="a b")}, "invalid_value", "response_format.json_schema.name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "missing_required_parameter",
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "invalid_value", "response_format"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "invalid_schema", "response_format"),
        ({"response_format": json_schema(), "grammar": 'root ::= "a"'}, "invalid_value", "grammar"),
        ({"response_format": {"type": "json_object"}, "grammar": "g"}, "invalid_value", "grammar"),
    ],
)
async def test_bad_format_is_named_and_never_dropped(
    rig: ServerRig, fields: dict[str, Any], code: str, param: str
) -> None:
    for stream in (False, True):
        assert_invalid(await rig.post(chat(**fields, stream=stream)), code, param)
    assert rig.engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_schema_that_the_engine_refuses_is_a_400_with_the_place(
    start_server: StartServer, stream: bool
) -> None:
    def refuse(request: Generate) -> list[Action]:
        param, message = "response_format", "the pattern at #/properties/a does not parse"
        return [Failed(request_id=request.request_id, code="invalid_schema", message=message, param=param)]

    rig = await start_server(FakeEngine(refuse))
    reply = await rig.post(chat(response_format=json_schema(), stream=stream))
    assert "#/properties/a" in assert_invalid(reply, "invalid_schema", "response_format")
    assert await rig.sample("s2moe_request_failures_total", reason="bad_schema") == 1


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"reasoning_effort": "high"}}),
        (
            {"reasoning_effort": "none"},
            {"chat_template_kwargs": {"reasoning_effort": "none"}, "enable_thinking": False},
        ),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "none", "enable_thinking": True},
            {"chat_template_kwargs": {"reasoning_effort": "none"}, "enable_thinking": True},
        ),
        (
            {
                "reasoning_effort": "low",
                "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "max", "x": [1]},
            },
            {"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "max", "x": [1]}},
        ),
    ],
)
async def test_thinking_reaches_the_template(
    rig: ServerRig, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    assert (await rig.post(chat(**fields))).status_code == 200
    assert options_of(rig) == options


ASSISTANT_LAST = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon"}]
USER_LAST = ASSISTANT_LAST[:1]


@pytest.mark.parametrize(
    ("messages", "fields", "options"),
    [
        (ASSISTANT_LAST, {}, {"continue_final_message": True}),
        (ASSISTANT_LAST, {"add_generation_prompt": False}, {"continue_final_message": True}),
        (ASSISTANT_LAST, {"continue_final_message": True}, {"continue_final_message": True}),
        (ASSISTANT_LAST, {"continue_final_message": False}, {}),
        (ASSISTANT_LAST, {"add_generation_prompt": True}, {}),
        (USER_LAST, {}, {}),
        (USER_LAST, {"add_generation_prompt": True}, {}),
        (USER_LAST, {"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ],
)
async def test_last_message_of_the_assistant_is_continued(
    rig: ServerRig, messages: list[dict[str, Any]], fields: dict[str, Any], options: dict[str, Any]
) -> None:
    assert (await rig.post({"messages": messages, **fields})).status_code == 200
    assert options_of(rig) == options


@pytest.mark.parametrize("fields", [{}, {"continue_final_message": True}])
@pytest.mark.parametrize("content", ["", None, []])
async def test_empty_last_message_of_the_assistant_begins_an_answer(
    rig: ServerRig, content: Any, fields: dict[str, Any]
) -> None:
    """The prompt would end without the assistant's role, and the answer begin with it."""
    messages = [*USER_LAST, {"role": "assistant", "content": content}]
    assert (await rig.post({"messages": messages, **fields})).status_code == 200
    assert options_of(rig) == {}
    assert msgspec.json.decode(rig.engine.requests[0].messages_json) == USER_LAST


async def test_empty_message_of_the_assistant_alone_is_refused(rig: ServerRig) -> None:
    reply = await rig.post({"messages": [{"role": "assistant", "content": ""}]})
    assert_invalid(reply, "invalid_value", "messages")


async def test_empty_message_that_has_reasoning_is_continued(rig: ServerRig) -> None:
    last = {"role": "assistant", "content": "", "reasoning_content": "Let me"}
    assert (await rig.post({"messages": [*USER_LAST, last]})).status_code == 200
    assert options_of(rig) == {"continue_final_message": True}


async def test_contradicting_continuation_is_named(rig: ServerRig) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    reply = await rig.post({"messages": ASSISTANT_LAST, **both})
    assert_invalid(reply, "invalid_value", "continue_final_message")


async def test_ignore_eos_reaches_the_engine(rig: ServerRig) -> None:
    for value in (True, False, None):
        await rig.post(chat(ignore_eos=value))
    assert [request.ignore_eos for request in rig.engine.requests] == [True, False, False]


async def test_model_without_answers_says_so(start_server: StartServer) -> None:
    engine = FakeEngine()
    engine.model = msgspec.structs.replace(MODEL, gives_embeddings=True)
    rig = await start_server(engine)
    assert "embeddings" in assert_invalid(await rig.post(chat()), "unsupported_model", "model")


# ── log probabilities ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "n_top"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
async def test_number_of_log_probabilities_reaches_the_engine(
    start_server: StartServer, fields: dict[str, Any], n_top: int | None
) -> None:
    rig = await start_server(FakeEngine(lambda r: answer_with_logprobs(r, ("a", -1.0))))
    choice = (await rig.post(chat(**fields))).json()["choices"][0]
    assert rig.engine.requests[0].n_top_logprobs == n_top
    assert (choice["logprobs"] is None) == (n_top is None)


EURO = "€".encode()


def parts_of_a_character(request: Generate) -> list[Action]:
    def token(piece: bytes, logprob: float) -> TokenLogprob:
        top = [TopLogprob(token=1, piece=piece, logprob=logprob)]
        return TokenLogprob(token=1, piece=piece, logprob=logprob, top=top)

    halves = [token(EURO[:1], -0.5), token(EURO[1:], float("-inf"))]
    steps = [
        Step(request_id=request.request_id, content="€", n_tokens=2, logprobs=halves),
        Step(request_id=request.request_id, reasoning="r", content="c", logprobs=[token(b"rc", -2.0)]),
        Step(request_id=request.request_id, logprobs=[token(b"held", -3.0)]),
    ]
    return [started(request), *steps, finished(request, tokens=4)]


def as_json(piece: bytes, logprob: float) -> dict[str, Any]:
    token = {"token": piece.decode(errors="replace"), "bytes": list(piece), "logprob": logprob}
    return {**token, "top_logprobs": [token]}


TOKENS = [
    as_json(EURO[:1], -0.5),
    as_json(EURO[1:], -9999.0),
    as_json(b"rc", -2.0),
    as_json(b"held", -3.0),
]


async def test_log_probabilities_of_a_whole_answer(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(parts_of_a_character))
    reply = await rig.post(chat(logprobs=True, top_logprobs=1))
    assert reply.json()["choices"][0]["logprobs"] == {"content": TOKENS, "refusal": None}
    assert TOKENS[0]["token"] == "\ufffd"


async def test_log_probabilities_are_in_the_last_chunk_of_their_step(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(parts_of_a_character))
    reply = await rig.post(chat(logprobs=True, top_logprobs=1, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks_of(reply.text)]
    assert [(choice["delta"], choice["logprobs"]) for choice in choices] == [
        ({"role": "assistant", "content": None}, None),
        ({"content": "€"}, {"content": TOKENS[:2], "refusal": None}),
        ({"reasoning_content": "r", "reasoning": "r"}, None),
        ({"content": "c"}, {"content": TOKENS[2:3], "refusal": None}),
        ({}, {"content": TOKENS[3:], "refusal": None}),
        ({}, None),
    ]
    assert {choice["finish_reason"] for choice in choices[:-1]} == {None}
