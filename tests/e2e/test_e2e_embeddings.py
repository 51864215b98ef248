"""Vectors of a real encoder through the whole path, and what such a model refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator

import openai
import pytest
from e2e_rig import ServeProcess

from embedding_model import N_CTX_TRAIN, N_EMBD, write_embedding_model

TEXTS = ["the cat sat", "on the mat", "something else"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("encoder")
    path = write_embedding_model(folder / "encoder.gguf")
    process = ServeProcess(folder / "log", "--model", str(path))
    process.wait_ready()
    yield process
    process.close()


def test_openai_client_gets_a_vector_of_length_one_for_each_text(server: ServeProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    many = [*TEXTS, *(f"text {index}" for index in range(40))]
    reply = client.embeddings.create(model="any", input=many)
    assert [each.index for each in reply.data] == list(range(len(many)))
    for each in reply.data:
        assert len(each.embedding) == N_EMBD
        assert math.isclose(math.hypot(*each.embedding), 1, abs_tol=1e-3)
    assert reply.usage.prompt_tokens > len(many)
    alone = client.embeddings.create(model="any", input=TEXTS[1], encoding_format="float", dimensions=N_EMBD)
    # neighbours in a batch change the rounding of 16-bit weights' sums, not more
    assert alone.data[0].embedding == pytest.approx(reply.data[1].embedding, abs=1e-3)
    assert alone.data[0].embedding != pytest.approx(reply.data[0].embedding, abs=1e-2)


def test_tokens_give_the_vector_of_their_text(server: ServeProcess) -> None:
    tokens = server.client.post("/tokenize", json={"content": TEXTS[0], "add_special": True}).json()["tokens"]
    reply = server.client.post("/v1/embeddings", json={"input": [TEXTS[0], tokens]})
    text, same = (each["embedding"] for each in reply.json()["data"])
    assert text == pytest.approx(same, abs=1e-3)


def test_what_is_too_long_is_400_with_both_numbers(server: ServeProcess) -> None:
    reply = server.client.post("/v1/embeddings", json={"input": "word " * 500})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert error["n_ctx"] == N_CTX_TRAIN < error["n_prompt_tokens"]
    assert f"maximum context length is {N_CTX_TRAIN} tokens" in error["message"]
    assert "where the model was trained for that" in error["message"]


def test_such_a_model_does_not_answer_and_says_so(server: ServeProcess) -> None:
    (card,) = server.client.get("/v1/models").json()["data"]
    assert card["capabilities"] == ["embedding"]
    assert card["meta"]["n_embd"] == N_EMBD
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        reply = server.client.post(path, json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "model"
