"""Real answers of a real model through the whole path."""

from __future__ import annotations

import threading
import time

import openai
import pytest
from e2e_rig import ServeProcess, curl, events

FRANCE = "What is the capital of France?"
STORY = "Tell me a long story about a river and the people who live beside it."


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_curl_streams_a_coherent_answer(server: ServeProcess) -> None:
    """The command of the README, word by word: no sampling fields."""
    body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": FRANCE}]}
    output, _ = curl(server.url, body).communicate(timeout=60)
    received = events(output)
    assert received[-1] == "[DONE]"
    chunks = received[:-1]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert "Paris" in text
    assert len(chunks) > 5, "it streams"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "delta": {},
        "finish_reason": "stop",
        "logprobs": None,
    }


def test_openai_client_streamed_equals_whole(client: openai.OpenAI) -> None:
    request = {"model": "demo", "messages": [{"role": "user", "content": STORY}], "temperature": 0}
    client.chat.completions.create(**request, max_tokens=40)  # both below then reuse the same prefix
    whole = client.chat.completions.create(**request, max_tokens=40)
    pieces, usage = [], None
    stream = client.chat.completions.create(
        **request, max_completion_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.choices:
            pieces.append(chunk.choices[0].delta.content or "")
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 40
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_openai_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=[{"role": "user", "content": FRANCE}], temperature=0
    ) as stream:
        stream.until_done()
        message = stream.get_final_completion().choices[0].message
    assert message.role == "assistant"
    assert "Paris" in (message.content or "")


def test_second_turn_reports_cached_tokens(client: openai.OpenAI) -> None:
    first = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": STORY}]
    answer = client.chat.completions.create(model="demo", messages=first, temperature=0, max_tokens=40)
    text = answer.choices[0].message.content
    turn = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(model="demo", messages=turn, temperature=0, max_tokens=8)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= answer.usage.prompt_tokens + 38
    assert second.usage.prompt_tokens - cached < 25


def test_stop_strings_seed_and_roles(client: openai.OpenAI) -> None:
    request = {
        "model": "any name",
        "messages": [
            {"role": "developer", "content": "You are a helpful assistant."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Count from one "}, {"type": "text", "text": "to ten."}],
            },
        ],
    }
    whole = client.chat.completions.create(**request, temperature=0, max_tokens=40).choices[0]
    assert whole.message.content
    stop = whole.message.content[10:14]
    cut = client.chat.completions.create(**request, temperature=0, max_tokens=40, stop=["§", stop]).choices[0]
    assert cut.message.content == whole.message.content[: whole.message.content.index(stop)]
    assert cut.finish_reason == "stop"
    draws = [
        client.chat.completions.create(**request, temperature=1.5, seed=7, max_tokens=20)
        .choices[0]
        .message.content
        for _ in range(2)
    ]
    assert draws[0] == draws[1]


def test_errors_reach_the_client_as_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "word " * 6000}])
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": FRANCE}],
            extra_body={"grammar": "root ::= ("},
        )
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "grammar")


def test_models_and_version(client: openai.OpenAI, server: ServeProcess) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    assert server.client.get("/version").json()["version"]


def test_client_that_leaves_makes_room_for_the_next(server: ServeProcess) -> None:
    body = {"stream": True, "max_tokens": 3000, "messages": [{"role": "user", "content": STORY}]}
    leaving = curl(server.url, body)
    assert leaving.stdout is not None
    while b'"content":"' not in (line := leaving.stdout.readline()) or b'"role"' in line:
        assert line, "the stream ended early"
    queued = curl(server.url, body)
    wait_for(server, "s2moe_requests_waiting", 1)
    queued.kill()
    queued.wait()
    wait_for(server, "s2moe_requests_waiting", 0)
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(server.chat(FRANCE).text))
    waiting.start()
    wait_for(server, "s2moe_requests_waiting", 1)
    assert not answers
    leaving.kill()
    leaving.wait()
    waiting.join(120)
    assert "Paris" in answers[0]
    assert server.metric('s2moe_request_cancellations_total{cause="disconnect",phase="queued"}') >= 1
    assert server.metric('s2moe_request_cancellations_total{cause="disconnect",phase="decode"}') >= 1
    n = server.metric("s2moe_cancellation_duration_seconds_count")
    seconds = server.metric("s2moe_cancellation_duration_seconds_sum") / n
    print(f"from the client's leaving to the idle engine: {seconds:.4f} s in the mean of {n:.0f}")
    assert seconds < 0.5  # 0.1 on an idle machine


def wait_for(server: ServeProcess, sample: str, value: float) -> None:
    deadline = time.monotonic() + 60
    while server.metric(sample) != value:
        assert time.monotonic() < deadline, f"{sample} did not become {value}"
        time.sleep(0.01)


def test_metrics_answer_during_a_long_prefill(server: ServeProcess) -> None:
    answers: list[int] = []
    prompt = "word " * 3500
    request = threading.Thread(target=lambda: answers.append(server.chat(prompt, max_tokens=1).status_code))
    request.start()
    wait_for(server, "s2moe_requests_running", 1)
    started = time.monotonic()
    assert server.health() == 200
    assert server.metric('s2moe_engine_state{state="busy"}') == 1
    assert time.monotonic() - started < 1
    assert not answers, "the prefill should still be running"
    request.join(60)
    assert answers == [200]


def test_counters_match_the_answer(server: ServeProcess) -> None:
    def counters() -> tuple[float, ...]:
        return (
            server.metric('s2moe_generated_tokens_total{kind="content",model="demo"}'),
            server.metric('s2moe_prompt_tokens_total{model="demo",source="cached"}'),
            server.metric('s2moe_prompt_tokens_total{model="demo",source="computed"}'),
        )

    before = counters()
    usage = server.chat("Say something new.", max_tokens=9).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    expected = (usage["completion_tokens"], cached, usage["prompt_tokens"] - cached)
    assert tuple(after - b for after, b in zip(counters(), before, strict=True)) == expected
