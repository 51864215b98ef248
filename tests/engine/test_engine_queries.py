"""Queries to the engine process: tokens, text, templates, also while it loads, answers or is told to stop."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_rig import Chat, EngineProcess

from s2moe.engine import messages as wire

FRANCE = ("user", "What is the capital of France?")
STORY = ("user", "Tell me a long story about a river and the people who live beside it.")
TEXTS = (
    "",
    "Hello, world!",
    "größer als 🙂 und <|im_start|>user\n",
    "  two  blanks ",
    "a\0b",
    "line\r\n\ttab",
)
REPLIES = (wire.Tokenized, wire.Detokenized, wire.Rendered, wire.Embedded, wire.QueryFailed)

Spawn = Callable[[], EngineProcess]


@pytest.fixture(scope="module")
def chat(tiny_model_path: Path) -> Iterator[Chat]:
    engine = EngineProcess()
    # one thread: two are slow where other processes want the processors
    ready = engine.load(tiny_model_path, n_ctx=2048, n_batch=256, n_threads=1)
    assert isinstance(ready, wire.Ready), ready
    yield Chat(engine)
    engine.close()


def ask(engine: EngineProcess, query: wire.Query) -> wire.QueryReply:
    engine.send(query)
    reply = engine.receive_until(*REPLIES)[-1]
    assert isinstance(reply, REPLIES)
    assert reply.query_id == query.query_id
    return reply


def tokens_of(chat: Chat, text: str, **options: bool) -> list[int]:
    reply = ask(chat.engine, wire.Tokenize(query_id="t", text=text, **options))
    assert isinstance(reply, wire.Tokenized), reply
    assert len(reply.pieces) == len(reply.tokens)
    return reply.tokens


def rendered(chat: Chat, *messages: tuple[str, str], **options: object) -> wire.Rendered:
    content = [{"role": role, "content": text} for role, text in messages]
    query = wire.ApplyTemplate(
        query_id="a",
        messages_json=json.dumps(content).encode(),
        chat_options_json=json.dumps(options).encode(),
    )
    reply = ask(chat.engine, query)
    assert isinstance(reply, wire.Rendered), reply
    return reply


def failure(chat: Chat, query: wire.Query) -> wire.QueryFailed:
    reply = ask(chat.engine, query)
    assert isinstance(reply, wire.QueryFailed), reply
    return reply


# ── answers ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("parse_special", [True, False])
def test_text_comes_back_from_its_tokens(chat: Chat, text: str, parse_special: bool) -> None:
    tokenized = ask(chat.engine, wire.Tokenize(query_id="t", text=text, parse_special=parse_special))
    assert isinstance(tokenized, wire.Tokenized)
    assert b"".join(tokenized.pieces) == text.encode()
    text_of = ask(chat.engine, wire.Detokenize(query_id="d", tokens=tokenized.tokens))
    assert text_of == wire.Detokenized(query_id="d", text=text.encode())


def test_special_text_is_one_token_only_if_it_may_be_special(chat: Chat) -> None:
    assert len(tokens_of(chat, "<|im_end|>")) == 1
    assert len(tokens_of(chat, "<|im_end|>", parse_special=False)) > 1


def test_rendered_prompt_is_what_a_request_is_answered_to(chat: Chat) -> None:
    prompt = rendered(chat, FRANCE)
    assert FRANCE[1] in prompt.prompt
    assert prompt.prompt.endswith("<|im_start|>assistant\n")
    _, finished = chat.ask(FRANCE, max_tokens=1)
    assert prompt.n_tokens == finished.n_prompt_tokens == len(tokens_of(chat, prompt.prompt))
    bare = rendered(chat, FRANCE, add_generation_prompt=False)
    assert prompt.prompt == bare.prompt + "<|im_start|>assistant\n"


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


def test_bad_queries_fail_alone(chat: Chat) -> None:
    n_vocab = 1 << 24
    unknown = failure(chat, wire.Detokenize(query_id="d", tokens=[1, n_vocab]))
    assert (unknown.code, unknown.param) == ("invalid_value", "tokens")
    assert str(n_vocab) in unknown.message
    malformed = failure(chat, wire.ApplyTemplate(query_id="a", messages_json=b"not json"))
    assert (malformed.code, malformed.param) == ("invalid_value", "messages")
    empty = failure(chat, wire.ApplyTemplate(query_id="a", messages_json=b"[]"))
    assert (empty.code, empty.param) == ("invalid_value", "messages")
    embed = failure(chat, wire.Embed(query_id="e", texts=["hello"]))
    assert embed.code == "unsupported"
    assert tokens_of(chat, "Hello")


@pytest.mark.parametrize(
    "query",
    [
        wire.Tokenize(query_id="t", text="<|im_end|>" * 700_000),
        wire.ApplyTemplate(
            query_id="a", messages_json=b'[{"role":"user","content":"%b"}]' % (b"<|im_end|>" * 700_000)
        ),
        wire.Detokenize(query_id="d", tokens=[2] * 1_000_000),
    ],
    ids=["tokenize", "template", "detokenize"],
)
def test_hopelessly_long_query_is_refused_at_once(chat: Chat, query: wire.Query) -> None:
    """Tokenising such a text takes longer than a minute."""
    started = time.monotonic()
    failed = failure(chat, query)
    assert failed.code == "context_length_exceeded"
    assert failed.n_ctx == 2048 < failed.n_prompt_tokens
    assert "maximum context length is 2048 tokens" in failed.message
    assert time.monotonic() - started < 5


# ── beside a request ────────────────────────────────────────────────────────────────────────────


def test_queries_are_answered_while_a_request_runs(chat: Chat) -> None:
    expected, _ = chat.ask(STORY, max_tokens=80)
    prompt = rendered(chat, FRANCE)
    request = chat.request(STORY, max_tokens=80)
    chat.engine.send(request)
    received = chat.engine.receive_until(wire.Step)
    # two at once, of different kinds
    for i in range(10):
        chat.engine.send(wire.Tokenize(query_id=f"t{i}", text=f"number {i}"))
        messages = b'[{"role": "user", "content": "What is the capital of France?"}]'
        chat.engine.send(wire.ApplyTemplate(query_id=f"a{i}", messages_json=messages))
    received += chat.engine.receive_until(wire.Finished)
    replies = [message for message in received if isinstance(message, REPLIES)]
    assert [reply.query_id for reply in replies] == [f"{kind}{i}" for i in range(10) for kind in "ta"]
    for reply in replies:
        if isinstance(reply, wire.Tokenized):
            assert b"".join(reply.pieces).decode() == f"number {reply.query_id[1:]}"
        else:
            assert reply == wire.Rendered(
                query_id=reply.query_id, prompt=prompt.prompt, n_tokens=prompt.n_tokens
            )
    text = "".join(message.content for message in received if isinstance(message, wire.Step))
    assert text == expected


def test_abort_takes_effect_while_queries_are_answered(chat: Chat) -> None:
    request = chat.request(STORY, max_tokens=None)
    chat.engine.send(request)
    chat.engine.receive_until(wire.Step)
    for i in range(30):
        chat.engine.send(wire.Tokenize(query_id=str(i), text="word " * 1500))
    thrown = time.monotonic()
    chat.engine.send(wire.Abort(request_id=request.request_id))
    n_replies, finished = 0, None
    while n_replies < 30 or finished is None:
        message = chat.engine.receive()
        if isinstance(message, wire.Finished):
            finished = message
            assert time.monotonic() - thrown < 5
        n_replies += isinstance(message, wire.Tokenized)
    assert finished.reason == "cancelled"


def test_abort_of_a_query_is_ignored(chat: Chat) -> None:
    chat.engine.send(wire.Tokenize(query_id="t", text="Hello"))
    chat.engine.send(wire.Abort(request_id="t"))
    assert isinstance(chat.engine.receive_until(*REPLIES)[-1], wire.Tokenized)
    assert chat.ask(FRANCE, max_tokens=2)[1].reason == "length"


def test_flood_is_answered_or_refused_query_by_query(chat: Chat) -> None:
    n_queries = 500

    def flood() -> None:
        for i in range(n_queries):
            chat.engine.send(wire.Tokenize(query_id=str(i), text="word " * 1000))

    # a front end sends and reads at once
    sending = threading.Thread(target=flood)
    sending.start()
    replies = [chat.engine.receive_until(*REPLIES)[-1] for _ in range(n_queries)]
    sending.join()
    assert len({reply.query_id for reply in replies}) == n_queries  # type: ignore[union-attr]
    refused = [reply for reply in replies if isinstance(reply, wire.QueryFailed)]
    assert all(reply.code == "queue_full" for reply in refused)
    assert len(tokens_of(chat, "Hello")) == 1


# ── the process's life ──────────────────────────────────────────────────────────────────────────


def test_query_before_ready_fails_with_loading(spawn: Spawn, tiny_model_path: Path) -> None:
    engine = spawn()
    assert isinstance(engine.receive(), wire.Hello)
    for query in (wire.Tokenize(query_id="t", text="x"), wire.Embed(query_id="e", texts=["x"])):
        engine.send(query)
        reply = engine.receive()
        assert isinstance(reply, wire.QueryFailed)
        assert (reply.query_id, reply.code) == (query.query_id, "loading")
    engine.send(wire.Configure(model_path=str(tiny_model_path), n_ctx=512, keep_expert_counts=False))
    engine.receive_until(wire.Ready)
    assert isinstance(ask(engine, wire.Tokenize(query_id="t", text="x")), wire.Tokenized)


def test_shutdown_beside_queries_is_orderly(spawn: Spawn, tiny_model_path: Path) -> None:
    engine = spawn()
    engine.load(tiny_model_path, n_ctx=2048)
    chat = Chat(engine)
    chat.engine.send(chat.request(STORY, max_tokens=None))
    engine.receive_until(wire.Step)
    for i in range(40):
        engine.send(wire.Tokenize(query_id=str(i), text="word " * 1500))
    engine.send(wire.Shutdown())
    assert engine.process.wait(10) == 0


def test_kill_with_a_query_under_way_closes_the_connection(spawn: Spawn, tiny_model_path: Path) -> None:
    engine = spawn()
    engine.load(tiny_model_path, n_ctx=512)
    os.kill(engine.process.pid, signal.SIGSTOP)
    engine.send(wire.Tokenize(query_id="t", text="x"))
    os.kill(engine.process.pid, signal.SIGKILL)
    with pytest.raises((EOFError, ConnectionResetError)):
        engine.receive_until(*REPLIES)


def test_model_is_described(spawn: Spawn, tiny_model_path: Path) -> None:
    ready = spawn().load(tiny_model_path, n_ctx=512)
    assert isinstance(ready, wire.Ready)
    assert "<|im_start|>" in ready.model.chat_template
    assert (ready.model.bos_token, ready.model.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert ready.model.n_embd > 0
    override = "{% for message in messages %}{{ message.content }}{% endfor %}"
    engine = spawn()
    other = engine.load(tiny_model_path, n_ctx=512, chat_template=override)
    assert isinstance(other, wire.Ready)
    assert other.model.chat_template == override
    assert rendered(Chat(engine), FRANCE).prompt == FRANCE[1]
