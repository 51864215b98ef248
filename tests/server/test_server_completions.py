"""/v1/completions: raw prompts, choices, echo, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import openai
import pytest
from fake_engine import MODEL, Action, FakeEngine, Generate, finished, started, step
from server_rig import ServerRig, StartServer, chat, chunks_of, events_of
from test_server_errors import assert_error, assert_invalid

from s2moe.engine.messages import Detokenize, Failed
from s2moe.server.engine_client import EngineState

COMPLETIONS = "/v1/completions"


def prompt_of(request: Generate) -> str:
    return request.prompt if request.prompt is not None else f"tokens {request.prompt_tokens}"


def numbered(request: Generate) -> Sequence[Action]:
    """Says what it was asked, so that tests see which answer belongs to which prompt."""
    return [
        started(request, prompt=5, cached=1),
        step(request, "<"),
        step(request, f"{prompt_of(request)}>"),
        finished(request, "length", prompt=5, cached=1, tokens=3),
    ]


async def complete(rig: ServerRig, **body: Any) -> httpx.Response:
    return await rig.http.post(COMPLETIONS, json=body)


async def test_answer_has_the_openai_shape(rig: ServerRig) -> None:
    reply = await complete(rig, model="m", prompt="once")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body.pop("timings")["predicted_per_second"] == 8.0
    assert body == {
        "object": "text_completion",
        "model": "demo",
        "system_fingerprint": "b1234-abcdef-p1",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 2,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_request_reaches_the_engine_as_a_raw_prompt(rig: ServerRig) -> None:
    await complete(rig, prompt="<|im_start|>", temperature=0, seed=-2, stop="x", ignore_eos=True, user="ann")
    (request,) = rig.engine.requests
    assert (request.prompt, request.prompt_tokens, request.messages_json) == ("<|im_start|>", None, b"")
    assert (request.max_tokens, request.stop, request.ignore_eos) == (16, ["x"], True)
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 2**32 - 2)
    assert request.n_top_logprobs is None


async def test_sampling_and_speculation_fields_are_those_of_chat(rig: ServerRig) -> None:
    fields = {"top_k": 5, "min_p": 0.1, "logit_bias": {"7": 2}, "grammar": 'root ::= "a"', "max_tokens": 7}
    await complete(rig, prompt="p", s2moe={"speculation": "off"}, **fields)
    (request,) = rig.engine.requests
    assert (request.sampling.top_k, request.sampling.min_p, request.max_tokens) == (5, 0.1, 7)
    assert (request.sampling.logit_bias, request.sampling.grammar) == ({7: 2.0}, 'root ::= "a"')
    assert request.speculation.method == "off"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
        ("", [""]),
    ],
)
async def test_prompt_in_each_of_its_forms(rig: ServerRig, prompt: Any, expected: list[Any]) -> None:
    reply = await complete(rig, prompt=prompt)
    assert reply.status_code == 200, reply.text
    given = [r.prompt if r.prompt_tokens is None else r.prompt_tokens for r in rig.engine.requests]
    assert given == expected
    assert [choice["index"] for choice in reply.json()["choices"]] == list(range(len(expected)))


async def test_choices_of_one_prompt_follow_each_other(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(numbered))
    body = (await complete(rig, prompt=["a", "b"], n=2, best_of=2)).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "<a>"),
        (1, "<a>"),
        (2, "<b>"),
        (3, "<b>"),
    ]
    # each prompt counts once, all answers count
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 12,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["timings"]["predicted_n"] == 12
    assert body["timings"]["predicted_ms"] == 1000.0


async def test_choices_of_one_prompt_have_seeds_of_their_own(rig: ServerRig) -> None:
    await complete(rig, prompt=["a", "b"], n=2, seed=2**32 - 1)
    assert [request.sampling.seed for request in rig.engine.requests] == [2**32 - 1, 0, 2**32 - 1, 0]
    rig.engine.requests.clear()
    await complete(rig, prompt="a", n=2)
    assert [request.sampling.seed for request in rig.engine.requests] == [None, None]


async def test_several_choices_take_one_place_in_the_queue(start_server: StartServer) -> None:
    go_on = asyncio.Event()
    rig = await start_server(FakeEngine(lambda r: [started(r), go_on, finished(r)]), queue_size=1)
    first = asyncio.create_task(complete(rig, prompt=["a", "b", "c"]))
    await rig.engine.until_running("a")
    second = asyncio.create_task(complete(rig, prompt="d"))
    await rig.until_waiting(1)
    assert (await complete(rig, prompt="e")).status_code == 429
    go_on.set()
    assert [reply.status_code for reply in await asyncio.gather(first, second)] == [200, 200]
    assert rig.engine.completed == ["a", "b", "c", "d"]


async def test_path_without_v1_answers_too(rig: ServerRig) -> None:
    assert (await rig.http.post("/completions", json={"prompt": "a"})).json()["object"] == "text_completion"


# echo


async def test_echo_puts_the_prompt_before_each_choice(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(numbered))
    body = (await complete(rig, prompt=["a", "b"], n=2, echo=True)).json()
    assert [choice["text"] for choice in body["choices"]] == ["a<a>", "a<a>", "b<b>", "b<b>"]
    assert rig.engine.queries == []


async def test_echo_of_tokens_is_their_text(rig: ServerRig) -> None:
    body = (await complete(rig, prompt=[[72, 105], [33]], echo=True)).json()
    assert [choice["text"] for choice in body["choices"]] == ["HiHello", "!Hello"]
    assert [q.tokens for q in rig.engine.queries if isinstance(q, Detokenize)] == [[72, 105], [33]]


async def test_echo_is_the_first_text_of_a_streamed_choice(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(numbered))
    reply = await complete(rig, prompt=["a", "b"], echo=True, stream=True)
    texts = [(c["index"], c["text"]) for chunk in chunks_of(reply.text) for c in chunk["choices"]]
    assert texts == [(0, "a"), (0, "<"), (0, "a>"), (0, ""), (1, "b"), (1, "<"), (1, "b>"), (1, "")]


async def test_echo_of_tokens_needs_the_engine(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(state=EngineState.LOADING, model=None))
    reply = await complete(rig, prompt=[1], echo=True)
    assert_error(reply, 503, "unavailable_error", "loading")
    assert await rig.sample("s2moe_requests_rejected_total", reason="loading") == 1


# streams


async def test_stream_is_byte_for_byte_what_clients_expect(rig: ServerRig) -> None:
    reply = await complete(rig, prompt="a", stream=True)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    first = chunks_of(reply.text)[0]
    head = (
        f'data: {{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},'
        '"model":"demo","system_fingerprint":"b1234-abcdef-p1","choices":[{"index":0,"text":'
    )
    timings = (
        ',"timings":{"cache_n":0,"prompt_n":10,"prompt_ms":500.0,"prompt_per_token_ms":50.0,'
        '"prompt_per_second":20.0,"predicted_n":2,"predicted_ms":250.0,"predicted_per_token_ms":125.0,'
        '"predicted_per_second":8.0}}\n\n'
    )
    assert reply.text == (
        head + '"Hel","logprobs":null,"finish_reason":null}]}\n\n'
        + head + '"lo","logprobs":null,"finish_reason":null}]}\n\n'
        + head + '"","logprobs":null,"finish_reason":"stop"}]' + timings
        + "data: [DONE]\n\n"
    )  # fmt: skip


async def test_usage_chunk_comes_last_with_empty_choices(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(numbered))
    reply = await complete(
        rig, prompt="a", n=2, stream=True, stream_options={"include_usage": True}, max_tokens=3
    )
    *others, last = chunks_of(reply.text)
    assert all(chunk["usage"] is None and "timings" not in chunk for chunk in others)
    assert [c["finish_reason"] for chunk in others for c in chunk["choices"]] == [
        *(None, None, "length"),
        *(None, None, "length"),
    ]
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 5
    assert last["usage"]["completion_tokens"] == 6
    assert last["timings"]["predicted_n"] == 6
    assert events_of(reply.text)[-1] == "[DONE]"


async def test_early_failure_of_a_stream_has_a_status(start_server: StartServer) -> None:
    def too_long(request: Generate) -> Sequence[Action]:
        failed = Failed(
            request_id=request.request_id,
            code="context_length_exceeded",
            message="too long",
            param="prompt",
            n_prompt_tokens=5000,
            n_ctx=4096,
        )
        return [failed]

    rig = await start_server(FakeEngine(too_long))
    reply = await complete(rig, prompt="a", stream=True)
    text = assert_invalid(reply, "context_length_exceeded", "prompt")
    assert "maximum context length is 4096 tokens" in text


async def test_late_failure_of_a_stream_is_an_event(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(
            lambda r: [
                started(r),
                step(r, "a"),
                Failed(request_id=r.request_id, code="internal", message="x"),
            ]
        )
    )
    events = events_of((await complete(rig, prompt="a", stream=True)).text)
    assert json.loads(events[-1])["error"]["code"] == "internal_error"
    assert "[DONE]" not in events


async def test_leaving_client_stops_all_choices(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: [started(r), step(r, "x"), 60.0]))
    async with rig.http.stream("POST", COMPLETIONS, json={"prompt": ["a", "b"], "stream": True}) as reply:
        async for _ in reply.aiter_text():
            break
    await rig.engine.until_aborted("a")
    await rig.until_idle()
    assert [request.prompt for request in rig.engine.requests] == ["a"]
    labels = {"phase": "decode", "cause": "disconnect"}
    assert await rig.sample("s2moe_request_cancellations_total", **labels) == 1


async def test_requests_are_counted_under_their_api(rig: ServerRig) -> None:
    await complete(rig, prompt="a")
    await complete(rig, prompt="a", echo=True, logprobs=1)
    labels = {"model": "demo", "api": "completions", "stream": "false"}
    assert await rig.sample("s2moe_requests_total", **labels, finish="stop") == 1
    assert await rig.sample("s2moe_requests_total", **labels, finish="error") == 1


# what is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [MODEL.n_vocab]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"suffix": "the end"}, "suffix"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": 3}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"s2moe": {"sped": 1}}, "s2moe"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "root ::= 'a'"}, "ebnf"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_wrong_field_is_named(rig: ServerRig, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        reply = await complete(rig, **{"prompt": "a", "stream": stream, **fields})
        assert param in assert_invalid(reply, "invalid_value", param)
    assert rig.engine.requests == []


async def test_missing_prompt_is_named(rig: ServerRig) -> None:
    assert_invalid(await complete(rig, model="m"), "missing_required_parameter", "prompt")


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": "", "best_of": 1, "n": 1, "echo": False, "logprobs": None, "stop": None, "n_probs": 3},
        {"max_tokens": 2**70, "seed": 2**70, "stream_options": None, "response_format": {"type": "text"}},
        {"max_tokens": None, "s2moe": None, "prompt": [0, MODEL.n_vocab - 1], "guided_json": {}},
    ],
)
async def test_harmless_fields_are_accepted(rig: ServerRig, fields: dict[str, Any]) -> None:
    assert (await complete(rig, **{"prompt": "a", **fields})).status_code == 200


@pytest.mark.parametrize("prompt", ["ab" * 4096, [1] * 4096])
async def test_prompt_that_cannot_fit_is_refused_before_it_waits(
    start_server: StartServer, prompt: str | list[int]
) -> None:
    rig = await start_server(FakeEngine(model=msgspec.structs.replace(MODEL, longest_piece_bytes=2)))
    reply = await complete(rig, prompt=prompt)
    text = assert_invalid(reply, "context_length_exceeded", "prompt")
    assert "maximum context length is 4096 tokens" in text
    error = reply.json()["error"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (4096, 4096)
    assert await rig.sample("s2moe_request_failures_total", reason="context_length") == 1
    assert rig.engine.requests == []


async def test_model_for_embeddings_continues_nothing(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(model=msgspec.structs.replace(MODEL, gives_embeddings=True)))
    for reply in (await complete(rig, prompt="a"), await rig.post(chat())):
        assert "/v1/embeddings" in assert_invalid(reply, "unsupported_model", "model")


async def test_other_model_is_404_only_when_the_server_is_strict(start_server: StartServer) -> None:
    rig = await start_server(strict_model=True)
    assert (await complete(rig, prompt="a", model="demo")).status_code == 200
    reply = await complete(rig, prompt="a", model="gpt-4o")
    assert_error(reply, 404, "not_found_error", "model_not_found", "model")


# the openai client


async def test_openai_client_reads_whole_answers_and_streams(rig: ServerRig) -> None:
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(model="any", prompt="a", max_tokens=8)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello", "stop")
        assert answer.usage is not None
        assert answer.usage.total_tokens == 12
        stream = await client.completions.create(model="any", prompt="a", stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
        assert chunks[-1].choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="suffix") as caught:
            await client.completions.create(model="any", prompt="a", suffix="b")
        assert caught.value.param == "suffix"
