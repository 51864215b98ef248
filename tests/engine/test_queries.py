"""The query desk on a model without a library: answers, errors, bounds, and its end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_model import FakeModel

from s2moe.engine.backlog import Backlog
from s2moe.engine.errors import RequestAbortedError, RequestError
from s2moe.engine.messages import (
    MAX_FRAME_BYTES,
    ApplyTemplate,
    Detokenize,
    Detokenized,
    Embed,
    FromEngine,
    QueryFailed,
    Rendered,
    Tokenize,
    Tokenized,
    encode_frame,
)
from s2moe.engine.native import NativeError, Status
from s2moe.engine.queries import QueryDesk, reply_to


class Desk:
    """A desk, and what it sends. `gate` holds it up."""

    def __init__(self, backlog: Backlog | None = None) -> None:
        self.model = FakeModel()
        self.sent: queue.Queue[FromEngine] = queue.Queue()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        tokenize = self.model.vocabulary.tokenize

        def slowly(text: str, **options: Any) -> list[int]:
            self.entered.set()
            assert self.gate.wait(20)
            return tokenize(text, **options)

        self.model.vocabulary.tokenize = slowly  # type: ignore[method-assign]
        model: Any = self.model
        self.desk = QueryDesk(model, backlog or Backlog(), self._send)

    def _send(self, message: FromEngine) -> None:
        encode_frame(message)  # as the channel does
        self.sent.put(message)

    def next(self) -> FromEngine:
        return self.sent.get(timeout=20)

    def ask(self, query: Tokenize | Detokenize | ApplyTemplate) -> FromEngine:
        self.desk.submit(query)
        return self.next()

    def hold(self) -> None:
        """Keeps the desk busy with a query of its own, `held`."""
        self.gate.clear()
        self.desk.submit(Tokenize(query_id="held", text="x"))
        assert self.entered.wait(20)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.gate.set()
    assert desk.desk.close(20)


# ── answers ─────────────────────────────────────────────────────────────────────────────────────


def test_tokens_and_their_pieces(desk: Desk) -> None:
    assert desk.ask(Tokenize(query_id="q", text="aé")) == Tokenized(
        query_id="q", tokens=[97, 233], pieces=[b"a", "é".encode()]
    )
    with_bos = desk.ask(Tokenize(query_id="q", text="a", add_special=True))
    assert isinstance(with_bos, Tokenized)
    assert with_bos.tokens == [0, 97]
    assert desk.ask(Tokenize(query_id="q", text="")) == Tokenized(query_id="q", tokens=[])


def test_text_of_tokens_has_control_tokens_too(desk: Desk) -> None:
    assert desk.ask(Detokenize(query_id="q", tokens=[97, 1, 233])) == Detokenized(
        query_id="q", text="a<control>é".encode()
    )
    assert desk.ask(Detokenize(query_id="q", tokens=[])) == Detokenized(query_id="q", text=b"")


def test_rendered_messages(desk: Desk) -> None:
    query = ApplyTemplate(
        query_id="q", messages_json=b'[{"content": "hello"}]', chat_options_json=b'{"tools": []}'
    )
    assert desk.ask(query) == Rendered(query_id="q", prompt="hello", n_tokens=5)
    assert desk.model.chat_template.requests == [{"messages": [{"content": "hello"}], "tools": []}]


def test_queries_are_answered_in_order(desk: Desk) -> None:
    desk.hold()
    for i in range(20):
        desk.desk.submit(Tokenize(query_id=str(i), text="x"))
    desk.gate.set()
    ids = [desk.next().query_id for _ in range(21)]  # type: ignore[union-attr]
    assert ids == ["held", *map(str, range(20))]


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("query", "param", "n_tokens"),
    [
        (Tokenize(query_id="q", text="x" * 400), "content", 100),
        (Detokenize(query_id="q", tokens=[97] * 100), "tokens", 100),
        (ApplyTemplate(query_id="q", messages_json=b'[{"content": "%b"}]' % (b"x" * 400)), "messages", 100),
    ],
)
def test_what_is_longer_than_the_context_is_refused_before_it_is_tokenised(
    desk: Desk, query: Tokenize | Detokenize | ApplyTemplate, param: str, n_tokens: int
) -> None:
    failed = desk.ask(query)
    assert isinstance(failed, QueryFailed)
    assert (failed.query_id, failed.code, failed.param) == ("q", "context_length_exceeded", param)
    assert (failed.n_prompt_tokens, failed.n_ctx) == (n_tokens, 64)
    assert not desk.entered.is_set()


def test_long_rendering_is_refused_before_it_is_tokenised(desk: Desk) -> None:
    desk.model.chat_template.chat = {"prompt": "x" * 400}
    failed = desk.ask(ApplyTemplate(query_id="q", messages_json=b"[]"))
    assert isinstance(failed, QueryFailed)
    assert failed.code == "context_length_exceeded"
    assert not desk.entered.is_set()


def test_context_may_be_filled_to_its_end(desk: Desk) -> None:
    """There is no answer to leave room for."""
    assert isinstance(desk.ask(Detokenize(query_id="q", tokens=[97] * 64)), Detokenized)
    assert isinstance(desk.ask(Tokenize(query_id="q", text="x" * 64)), Tokenized)
    messages = b'[{"content": "%b"}]' % (b"x" * 64)
    assert isinstance(desk.ask(ApplyTemplate(query_id="q", messages_json=messages)), Rendered)


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        (Detokenize(query_id="q", tokens=[-1]), "invalid_value", "tokens"),
        (Detokenize(query_id="q", tokens=[1 << 21]), "invalid_value", "tokens"),
        (ApplyTemplate(query_id="q", messages_json=b"no JSON"), "invalid_value", "messages"),
        (ApplyTemplate(query_id="q", messages_json=b"[]", chat_options_json=b"1"), "invalid_value", None),
    ],
)
def test_bad_queries_fail_alone(
    desk: Desk, query: Detokenize | ApplyTemplate, code: str, param: str | None
) -> None:
    failed = desk.ask(query)
    assert isinstance(failed, QueryFailed)
    assert (failed.code, failed.param) == (code, param)
    assert isinstance(desk.ask(Detokenize(query_id="q", tokens=[97])), Detokenized)


def test_refusal_of_the_template_is_the_querys(desk: Desk) -> None:
    desk.model.chat_template.failure = NativeError(Status.GRAMMAR, "no such type")
    query = ApplyTemplate(query_id="q", messages_json=b"[]", chat_options_json=b'{"json_schema": {}}')
    failed = desk.ask(query)
    assert isinstance(failed, QueryFailed)
    assert (failed.code, failed.param) == ("invalid_schema", "response_format")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("unsupported", "no embeddings"), "unsupported"),
        (RequestAbortedError(), "cancelled"),
        (MemoryError(), "insufficient_memory"),
        (KeyError("secret of the inside"), "internal"),
    ],
)
def test_every_failure_is_a_reply(error: Exception, code: str) -> None:
    def fail(_query: Embed) -> Any:
        raise error

    failed = reply_to(Embed(query_id="q"), fail)
    assert isinstance(failed, QueryFailed)
    assert (failed.query_id, failed.code) == ("q", code)
    assert "secret" not in failed.message


def test_answer_that_is_too_long_for_the_wire_is_an_error(desk: Desk) -> None:
    desk.model.vocabulary.pieces[97] = b"x" * (MAX_FRAME_BYTES + 1)
    failed = desk.ask(Detokenize(query_id="q", tokens=[97]))
    assert isinstance(failed, QueryFailed)
    assert failed.code == "invalid_value"
    assert isinstance(desk.ask(Detokenize(query_id="q", tokens=[98])), Detokenized)


# ── bounds ──────────────────────────────────────────────────────────────────────────────────────


def flooded(backlog: Backlog, texts: list[str]) -> list[FromEngine]:
    """What is said of a query with each text while another one is being answered."""
    desk = Desk(backlog)
    desk.hold()
    replies = []
    for i, text in enumerate(texts):
        desk.desk.submit(Tokenize(query_id=str(i), text=text))
    while not desk.sent.empty():
        replies.append(desk.next())
    desk.gate.set()
    for _ in range(len(texts) + 1 - len(replies)):
        assert isinstance(desk.next(), Tokenized)
    # there is room again
    assert isinstance(desk.ask(Tokenize(query_id="q", text="x")), Tokenized)
    assert desk.desk.close(20)
    return replies


def test_too_many_queries_are_refused_at_once() -> None:
    replies = flooded(Backlog(max_waiting=4), ["x"] * 6)
    assert [reply.query_id for reply in replies] == ["3", "4", "5"]  # type: ignore[union-attr]
    assert all(isinstance(reply, QueryFailed) and reply.code == "queue_full" for reply in replies)


def test_too_much_text_is_refused_at_once() -> None:
    replies = flooded(Backlog(max_bytes=100), ["x" * 60, "y" * 60, "z" * 20])
    assert [reply.query_id for reply in replies] == ["1"]  # type: ignore[union-attr]


def test_one_query_alone_is_never_too_much() -> None:
    backlog = Backlog(max_waiting=1, max_bytes=10)
    large = Embed(query_id="q", texts=["x" * 50], token_lists=[[1] * 1000])
    small = Detokenize(query_id="q", tokens=[])
    for _ in range(3):
        assert backlog.enter(large)
        assert not backlog.enter(small)
        backlog.leave(large)


# ── the end ─────────────────────────────────────────────────────────────────────────────────────


def test_close_waits_for_the_running_query_and_drops_the_rest() -> None:
    desk = Desk()
    desk.hold()
    for i in range(3):
        desk.desk.submit(Tokenize(query_id=str(i), text="x"))
    assert not desk.desk.close(0.05), "the model must not be freed yet"
    desk.gate.set()
    assert desk.desk.close(20)
    held = desk.next()
    assert isinstance(held, Tokenized)
    assert held.query_id == "held"
    assert desk.sent.empty()
