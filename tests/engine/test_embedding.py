"""Models that give vectors instead of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from engine_rig import EngineProcess

from s2moe.engine import messages as wire
from s2moe.engine.embedding import N_SEQUENCES
from s2moe.engine.errors import EngineStartError, RequestError
from s2moe.engine.messages import Configure
from s2moe.engine.model import Model

from embedding_model import N_CTX_TRAIN, N_EMBD, write_embedding_model
from gguf_factory import write_random_model

TEXTS = ["the cat sat", "on the mat", "a completely different sentence, somewhat longer than the others"]


def load(path: Path, **options: object) -> Model:
    configure = Configure(model_path=str(path), keep_expert_counts=False, **options)  # type: ignore[arg-type]
    return Model(configure, lambda _phase, _fraction: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    model = load(write_embedding_model(tmp_path_factory.mktemp("encoder") / "encoder.gguf"))
    yield model
    model.close()


def test_vectors_have_length_one_and_tell_texts_apart(model: Model) -> None:
    vectors, n_tokens = model.embed(TEXTS, [])
    assert [len(vector) for vector in vectors] == [N_EMBD] * 3
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1.0] * 3)
    assert n_tokens == [
        len(model.vocabulary.tokenize(t, add_special=True, parse_special=False)) for t in TEXTS
    ]
    products = np.array(vectors) @ np.array(vectors).T
    assert (products[np.triu_indices(3, 1)] < 0.999).all()


def test_neighbours_in_a_batch_change_nothing(model: Model) -> None:
    together, _ = model.embed(TEXTS, [])
    alone = [model.embed([text], [])[0][0] for text in TEXTS]
    np.testing.assert_allclose(together, alone, atol=1e-3)


def test_more_texts_than_fit_one_batch_come_back_in_order(model: Model) -> None:
    lists = [[40 + i, 50 + i, 60 + i] for i in range(N_SEQUENCES + 5)] + [[30] * 90, [31] * 90]
    vectors, n_tokens = model.embed(["first"], lists)
    assert n_tokens[1:] == [len(tokens) for tokens in lists]
    for tokens, vector in zip(lists, vectors[1:], strict=True):
        np.testing.assert_allclose(vector, model.embed([], [tokens])[0][0], atol=1e-3)


def test_order_of_words_matters(model: Model) -> None:
    (one, other), _ = model.embed([], [[40, 50, 60], [60, 50, 40]])
    assert np.dot(one, other) < 0.9999


def test_pooling_is_the_models(tmp_path: Path) -> None:
    first, last = (
        load(write_embedding_model(tmp_path / f"{pooling.name}.gguf", pooling=pooling))
        for pooling in (gguf.PoolingType.CLS, gguf.PoolingType.LAST)
    )
    try:
        # the same weights: of one token, first and last are one; of more they are not
        one = [40]
        np.testing.assert_allclose(first.embed([], [one])[0], last.embed([], [one])[0], atol=1e-6)
        more = [40, 50, 60]
        assert np.dot(first.embed([], [more])[0][0], last.embed([], [more])[0][0]) < 0.999
    finally:
        first.close()
        last.close()


def test_model_says_what_it_is(model: Model) -> None:
    assert model.info.gives_embeddings
    assert (model.info.n_embd, model.info.n_ctx) == (N_EMBD, N_CTX_TRAIN)
    assert model.info.chat_template == ""
    assert model.info.speculation_method == "off"
    assert model.plan is not None
    assert (model.plan.prompt_cache_bytes, model.plan.capacity_bytes, model.experts) == (0, 0, None)


def refusal(call: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    return caught.value


def test_inputs_that_cannot_be_embedded_are_refused(model: Model) -> None:
    longest = [[40] * N_CTX_TRAIN]
    assert model.embed([], longest)[1] == [N_CTX_TRAIN]
    error = refusal(lambda: model.embed([], [[40] * (N_CTX_TRAIN + 1)]))
    assert (error.code, error.param) == ("context_length_exceeded", "input")
    assert (error.n_prompt_tokens, error.n_ctx) == (N_CTX_TRAIN + 1, N_CTX_TRAIN)
    assert error.message.startswith(f"This model's maximum context length is {N_CTX_TRAIN} tokens, but")
    assert "--batch-size" in error.message
    assert refusal(lambda: model.embed(["x" * 10_000_000], [])).code == "context_length_exceeded"
    for tokens in ([], [-1], [1 << 30]):
        assert refusal(lambda tokens=tokens: model.embed([], [tokens])).code == "invalid_value"  # type: ignore[misc]
    model.embed(TEXTS, [])  # and it goes on


def test_small_batches_bound_the_length(tmp_path: Path) -> None:
    model = load(write_embedding_model(tmp_path / "m.gguf"), n_batch=40)
    try:
        assert model.info.n_ctx == 40
        assert refusal(lambda: model.embed([], [[40] * 41])).n_ctx == 40
    finally:
        model.close()


def test_reranker_is_refused_at_the_start(tmp_path: Path) -> None:
    path = write_embedding_model(tmp_path / "m.gguf", pooling=gguf.PoolingType.RANK)
    with pytest.raises(EngineStartError, match="reranker"):
        load(path)


def test_generative_model_gives_no_embeddings(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_random_model(path, "qwen3moe")
    model = load(path, n_ctx=128)
    try:
        assert not model.info.gives_embeddings
        assert refusal(lambda: model.embed(["text"], [])).code == "unsupported"
    finally:
        model.close()


def test_engine_embeds_and_refuses_to_generate(spawn: Callable[[], EngineProcess], tmp_path: Path) -> None:
    engine = spawn()
    ready = engine.load(write_embedding_model(tmp_path / "m.gguf"))
    assert isinstance(ready, wire.Ready), ready
    assert ready.model.gives_embeddings
    engine.send(wire.Embed(query_id="q", texts=TEXTS[:1], token_lists=[[40, 41]]))
    reply = engine.receive_until(wire.Embedded, wire.QueryFailed)[-1]
    assert isinstance(reply, wire.Embedded), reply
    assert [math.hypot(*vector) for vector in reply.vectors] == pytest.approx([1.0, 1.0])
    assert reply.n_tokens[1] == 2
    for request in (
        wire.Generate(request_id="m", messages_json=b'[{"role":"user","content":"Hi"}]'),
        wire.Generate(request_id="p", prompt="Hi"),
        wire.Generate(request_id="t", prompt_tokens=[40, 41]),
    ):
        engine.send(request)
        failed = engine.receive_until(wire.Failed, wire.Finished)[-1]
        assert isinstance(failed, wire.Failed), failed
        assert failed.code == "unsupported"
        assert "embeddings" in failed.message


def test_embed_is_aborted_while_it_waits_and_while_it_runs(
    spawn: Callable[[], EngineProcess], tmp_path: Path
) -> None:
    engine = spawn()
    engine.load(write_embedding_model(tmp_path / "m.gguf"))
    for name in ("running", "waiting"):
        engine.send(wire.Embed(query_id=name, token_lists=[[40] * 90] * 4000))
    for name in ("waiting", "running"):
        engine.send(wire.Abort(request_id=name))
    engine.send(wire.Embed(query_id="next", token_lists=[[40, 41]]))
    for name in ("running", "waiting"):
        reply = engine.receive_until(wire.Embedded, wire.QueryFailed)[-1]
        assert isinstance(reply, wire.QueryFailed), reply
        assert (reply.query_id, reply.code) == (name, "cancelled")
    reply = engine.receive_until(wire.Embedded, wire.QueryFailed)[-1]
    assert isinstance(reply, wire.Embedded), reply
    assert reply.query_id == "next"
