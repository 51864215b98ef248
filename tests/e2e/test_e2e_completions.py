"""Raw prompts, tokens, templates and props of a real model through the whole path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e_rig import ServeProcess, curl, events

FRANCE = "What is the capital of France?"
STORY = "Tell me a long story about a river and the people who live beside it."
EXACT = {"temperature": 0, "s2moe": {"speculation": "off"}}
"""The same text whatever was asked before."""
TEXT = "A fish 🐟, a naïve café, and <|im_start|>."


def post(server: ServeProcess, path: str, **body: Any) -> Any:
    reply = server.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def complete(server: ServeProcess, prompt: Any, **fields: Any) -> Any:
    return post(server, "/v1/completions", prompt=prompt, **{**EXACT, **fields})


def conversation(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_tokens_and_pieces_give_the_text_back(server: ServeProcess) -> None:
    tokens = post(server, "/tokenize", content=TEXT)["tokens"]
    assert post(server, "/detokenize", tokens=tokens)["content"] == TEXT
    with_pieces = post(server, "/tokenize", content=TEXT, with_pieces=True)["tokens"]
    assert [each["id"] for each in with_pieces] == tokens
    pieces = [each["piece"] for each in with_pieces]
    data = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    assert data.decode() == TEXT
    assert "<|im_start|>" in pieces
    plain = post(server, "/tokenize", content=TEXT, parse_special=False)["tokens"]
    assert len(plain) > len(tokens)


def test_template_length_and_answer_are_those_of_chat(server: ServeProcess) -> None:
    prompt = post(server, "/apply-template", **conversation(FRANCE))["prompt"]
    assert FRANCE in prompt
    whole = server.chat(FRANCE, max_tokens=12, **EXACT).json()
    counted = post(server, "/v1/chat/completions/input_tokens", **conversation(FRANCE))
    assert counted == {"object": "response.input_tokens", "input_tokens": whole["usage"]["prompt_tokens"]}
    tokens = post(server, "/tokenize", content=prompt)["tokens"]
    for form in (prompt, tokens):
        raw = complete(server, form, max_tokens=12)
        assert raw["choices"][0]["text"] == whole["choices"][0]["message"]["content"]
        assert raw["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        assert raw["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_stream_holds_what_the_whole_answer_holds(server: ServeProcess) -> None:
    body = {"prompt": ["Once upon a time", "The sea"], "max_tokens": 10, "stream": True, **EXACT}
    reply = server.client.post("/v1/completions", json=body)
    received = events(reply.content)
    assert received[-1] == "[DONE]"
    texts = ["", ""]
    for chunk in received[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    whole = complete(server, body["prompt"], max_tokens=10)
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert whole["usage"]["completion_tokens"] == 20


def test_echo_and_stop(server: ServeProcess) -> None:
    prompt = "One, two, three,"
    plain = complete(server, prompt, max_tokens=12)["choices"][0]["text"]
    tokens = post(server, "/tokenize", content=prompt)["tokens"]
    for form in (prompt, tokens):
        assert complete(server, form, max_tokens=12, echo=True)["choices"][0]["text"] == prompt + plain
    stop = plain[3:6]
    stopped = complete(server, prompt, max_tokens=12, stop=stop)["choices"][0]
    assert stopped["text"] == plain[: plain.index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_choices_are_reproducible_and_differ(server: ServeProcess) -> None:
    fields = {"n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 12}
    first, second = (complete(server, "Once", **fields) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) > 1


def test_logprobs_belong_to_the_text(server: ServeProcess) -> None:
    choice = complete(server, "The weather today is", max_tokens=10, logprobs=3)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert len(logprobs["tokens"]) == 10
    offset = 0
    for token, logprob, top, begin in zip(
        *(logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")), strict=True
    ):
        assert begin == offset
        offset += len(token)
        assert logprob <= 0
        assert top[token] == logprob
        assert 3 <= len(top) <= 4
        # at temperature 0 the likeliest is chosen
        assert logprob == pytest.approx(max(top.values()), abs=1e-3)


def test_questions_do_not_wait_for_an_answer(server: ServeProcess) -> None:
    running = curl(server.url, conversation(STORY) | {"stream": True, "max_tokens": 3000})
    try:
        assert running.stdout is not None
        running.stdout.readline()
        assert post(server, "/tokenize", content="a")["tokens"]
        assert post(server, "/apply-template", **conversation("hi"))["prompt"]
        assert server.metric("s2moe_requests_running") == 1
    finally:
        running.kill()
        running.communicate()


def test_props_tell_what_runs(server: ServeProcess, tiny_model_path: Path) -> None:
    reply = server.client.get("/props")
    props = reply.json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    params = props["default_generation_settings"]["params"]
    assert (params["top_k"], params["repeat_last_n"]) == (40, 64)
    assert props["model_path"] == tiny_model_path.name
    assert str(tiny_model_path.parent) not in reply.text
    assert props["model"]["n_expert"] == 8
    assert "<|im_start|>" in props["chat_template"]
    assert props["eos_token"]
    plan = props["plan"]
    assert set(plan["pools"]) >= {"weights", "kv", "expert_cache"}
    assert sum(plan["pools"].values()) <= plan["budget_bytes"]


def test_a_model_that_answers_gives_no_vectors(server: ServeProcess) -> None:
    reply = server.client.post("/v1/embeddings", json={"input": "a"})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "unsupported_model"


def test_prompt_beyond_the_context_is_400_with_both_numbers(server: ServeProcess) -> None:
    for stream in (False, True):
        reply = server.client.post("/v1/completions", json={"prompt": "word " * 5000, "stream": stream})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["n_ctx"] == 4096 <= error["n_prompt_tokens"]
