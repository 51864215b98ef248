"""Chat completions that are not streamed."""

from __future__ import annotations

from fake_engine import FakeEngine, finished, started, step
from server_rig import ServerRig, StartServer, chat


async def test_answer_has_the_openai_shape(rig: ServerRig) -> None:
    reply = await rig.post(chat())
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body.pop("timings")["predicted_per_second"] == 8.0
    assert body == {
        "object": "chat.completion",
        "model": "demo",
        "system_fingerprint": "b1234-abcdef-p1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 2,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_reasoning_is_apart_from_content(start_server: StartServer) -> None:
    rig = await start_server(
        FakeEngine(
            lambda r: [
                started(r),
                step(r, reasoning="th"),
                step(r, reasoning="ink"),
                step(r, "yes"),
                finished(r, tokens=3, reasoning_tokens=2),
            ]
        )
    )
    body = (await rig.post(chat())).json()
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "think",
        "reasoning": "think",
    }
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


async def test_answer_without_any_token_is_complete(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(lambda r: [started(r), finished(r, tokens=0)]))
    body = (await rig.post(chat())).json()
    assert body["choices"][0]["message"]["content"] == ""
    assert body["usage"]["completion_tokens"] == 0
    assert body["timings"]["predicted_per_token_ms"] == 0.0


async def test_stream_null_means_not_streamed(rig: ServerRig) -> None:
    assert (await rig.post(chat(stream=None))).json()["object"] == "chat.completion"
