"""The stream of a chat completion, byte by byte and chunk by chunk."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_engine import Action, FakeEngine, Generate, finished, started, step
from server_rig import CHAT, ServerRig, StartServer, chat, chunks_of, events_of

from s2moe.engine.messages import Step, TokenLogprob

USAGE = {"include_usage": True}


async def test_stream_is_byte_for_byte_what_clients_expect(rig: ServerRig) -> None:
    reply = await rig.post(chat(stream=True))
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    first = chunks_of(reply.text)[0]
    head = (
        f'data: {{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},'
        '"model":"demo","system_fingerprint":"b1234-abcdef-p1","choices":[{"index":0,"delta":'
    )
    tail = ',"logprobs":null,"finish_reason":null}]}\n\n'
    timings = (
        ',"timings":{"cache_n":0,"prompt_n":10,"prompt_ms":500.0,"prompt_per_token_ms":50.0,'
        '"prompt_per_second":20.0,"predicted_n":2,"predicted_ms":250.0,"predicted_per_token_ms":125.0,'
        '"predicted_per_second":8.0}}\n\n'
    )
    assert reply.text == (
        head + '{"role":"assistant","content":null}' + tail + head + '{"content":"Hel"}' + tail
        + head + '{"content":"lo"}' + tail
        + head + '{},"logprobs":null,"finish_reason":"stop"}]' + timings
        + "data: [DONE]\n\n"
    )  # fmt: skip
    assert first["id"].startswith("chatcmpl-")


async def test_usage_chunk_comes_last_with_empty_choices_and_timings(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(
            lambda r: [
                started(r, cached=6),
                step(r, "a"),
                finished(r, "length", cached=6, tokens=3, reasoning_tokens=1),
            ]
        )
    )
    chunks = chunks_of((await rig.post(chat(stream=True, stream_options=USAGE))).text)
    *others, last = chunks
    assert [chunk["usage"] for chunk in others] == [None] * 3
    assert others[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert "timings" not in others[-1]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert last["timings"]["cache_n"] == 6
    assert last["timings"]["prompt_n"] == 4


async def test_usage_is_absent_unless_asked_for(rig: ServerRig) -> None:
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        for chunk in chunks_of((await rig.post(chat(stream=True, **options))).text):
            assert "usage" not in chunk
            assert len(chunk["choices"]) == 1


async def test_reasoning_has_both_names_and_never_shares_a_chunk_with_content(
    start_server: StartServer,
) -> None:
    rig = await start_server(
        FakeEngine(
            lambda r: [
                started(r),
                step(r, reasoning="think"),
                step(r, "an", reasoning=" hard", n_tokens=2),
                step(r, "swer"),
                finished(r, tokens=4),
            ]
        )
    )
    deltas = [c["choices"][0]["delta"] for c in chunks_of((await rig.post(chat(stream=True))).text)]
    assert deltas == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "think", "reasoning": "think"},
        {"reasoning_content": " hard", "reasoning": " hard"},
        {"content": "an"},
        {"content": "swer"},
        {},
    ]


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("both", ["reasoning_content", "reasoning"]),
        ("reasoning_content", ["reasoning_content"]),
        ("reasoning", ["reasoning"]),
    ],
)
async def test_reasoning_has_the_names_of_the_setting(
    start_server: StartServer, setting: str, names: list[str]
) -> None:
    def thoughtful(request: Generate) -> list[Action]:
        thought = TokenLogprob(token=1, piece=b"hm", logprob=-0.5)
        steps = [step(request, reasoning="think"), step(request, "so", reasoning=" hard")]
        last = Step(request_id=request.request_id, reasoning="hm", logprobs=[thought])
        return [started(request), *steps, last, finished(request)]

    rig = await start_server(FakeEngine(thoughtful), reasoning_fields=setting)
    deltas = [c["choices"][0]["delta"] for c in chunks_of((await rig.post(chat(stream=True))).text)]
    thoughts = [dict.fromkeys(names, text) for text in ("think", " hard", "hm")]
    assert deltas[1:-1] == [*thoughts[:2], {"content": "so"}, thoughts[2]]
    message = (await rig.post(chat())).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "so"} | dict.fromkeys(names, "think hardhm")


async def test_each_chunk_has_same_identity(rig: ServerRig) -> None:
    chunks = chunks_of((await rig.post(chat(stream=True, stream_options=USAGE))).text)
    identity = [{k: c[k] for k in ("id", "object", "created", "model", "system_fingerprint")} for c in chunks]
    assert identity == [identity[0]] * 5


async def test_each_token_leaves_at_once(start_server: StartServer) -> None:
    go_on = asyncio.Event()
    rig = await start_server(
        FakeEngine(lambda r: [started(r), step(r, "a"), go_on, step(r, "b"), finished(r)])
    )
    async with rig.http.stream("POST", CHAT, json=chat(stream=True)) as reply:
        text = ""
        async for piece in reply.aiter_text():
            text += piece
            if '{"content":"a"}' in text and not go_on.is_set():
                assert '{"content":"b"}' not in text
                go_on.set()
    assert events_of(text)[-1] == "[DONE]"


async def test_comments_are_sent_before_the_first_token(start_server: StartServer) -> None:
    go_on = asyncio.Event()
    rig = await start_server(
        FakeEngine(lambda r: [go_on, started(r), step(r, "a"), finished(r)]), ping_interval=0.05
    )
    async with rig.http.stream("POST", CHAT, json=chat(stream=True)) as reply:
        assert reply.status_code == 200
        text = ""
        async for piece in reply.aiter_text():
            text += piece
            if text.count(": ping\n\n") >= 3:
                go_on.set()
    assert text.startswith(": ping\n\n")
    assert "data:" not in text[: text.index(": ping\n\n", 10)]
    assert events_of(text)[-1] == "[DONE]"


async def test_comments_fill_silence_between_tokens(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(lambda r: [started(r), step(r, "a"), 0.4, step(r, "b"), finished(r)]), ping_interval=0.05
    )
    text = (await rig.post(chat(stream=True))).text
    between = text[text.index('"a"') : text.index('"b"')]
    assert between.count(": ping\n\n") >= 2
    assert events_of(text)[-1] == "[DONE]"


async def test_ping_interval_zero_sends_no_comment(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(lambda r: [started(r), step(r, "a"), 0.2, finished(r)]), ping_interval=0
    )
    assert ": " not in (await rig.post(chat(stream=True))).text.replace("data: {", "").replace("data: [", "")


async def test_text_that_needs_escaping_survives(start_server: StartServer) -> None:
    texts = ['"quoted"\\', "line\nbreak\r\n\n", "日本語 🦙", "\u2028\x00\x1f", "data: [DONE]"]
    rig = await start_server(
        FakeEngine(lambda r: [started(r), *(step(r, text) for text in texts), finished(r, tokens=5)])
    )
    deltas: list[Any] = [
        c["choices"][0]["delta"].get("content") for c in chunks_of((await rig.post(chat(stream=True))).text)
    ]
    assert deltas == [None, *texts, None]


async def test_path_without_v1_answers_too(rig: ServerRig) -> None:
    reply = await rig.http.post("/chat/completions", json=chat(stream=True))
    assert events_of(reply.text)[-1] == "[DONE]"


async def test_sampling_reaches_the_engine(rig: ServerRig) -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": -2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repeat_penalty": 1.1,
        "logit_bias": {"7": -100, "8": 1.5},
        "grammar": 'root ::= "yes"',
    }
    await rig.post(
        chat("q", max_tokens=5, max_completion_tokens=7, stop=["a", "b"], unknown_field=1, **fields)
    )
    (request,) = rig.engine.requests
    assert request.max_tokens == 7
    assert request.stop == ["a", "b"]
    sampling = request.sampling
    assert sampling.seed == 2**32 - 2
    assert sampling.logit_bias == {7: -100.0, 8: 1.5}
    for name in set(fields) - {"seed", "logit_bias"}:
        assert getattr(sampling, name) == fields[name]


async def test_messages_reach_the_engine_in_its_form(rig: ServerRig) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [], "reasoning_content": "r"},
        {"role": "user", "content": "c"},
    ]
    reply = await rig.post({"messages": messages, "max_tokens": None, "stop": "x", "tools": [], "n": 1})
    assert reply.status_code == 200
    (request,) = rig.engine.requests
    assert json.loads(request.messages_json) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "reasoning_content": "r"},
        {"role": "user", "content": "c"},
    ]
    assert request.max_tokens is None
    assert request.stop == ["x"]
    assert request.sampling.temperature is None
