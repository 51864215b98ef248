"""Log probabilities of text completions, in OpenAI's legacy lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fake_engine import Action, FakeEngine, Generate, finished, started, step
from hypothesis import given
from hypothesis import strategies as st
from server_rig import ServerRig, StartServer, chunks_of

from s2moe.engine.messages import Step, TokenLogprob, TopLogprob
from s2moe.server.stream.text_answer import TextAnswer
from s2moe.server.stream.text_chunks import TextChunkEncoder
from s2moe.server.stream.text_completion import TextCompletionBuilder
from s2moe.server.stream.text_logprobs import TextLogprobs, piece_text

COMPLETIONS = "/v1/completions"
REQUEST = Generate(request_id="r", prompt="p")


def token(piece: bytes, logprob: float, *top: tuple[bytes, float]) -> TokenLogprob:
    likeliest = [TopLogprob(token=i, piece=each, logprob=value) for i, (each, value) in enumerate(top)]
    return TokenLogprob(token=7, piece=piece, logprob=logprob, top=likeliest)


def fish(request: Generate) -> Sequence[Action]:
    """A character in two tokens, and a last step that has only a log probability."""
    whole = "🐟".encode()
    steps = [
        Step(request_id="", content="a", logprobs=[token(b"a", -0.5, (b"a", -0.5), (b"b", -1.5))]),
        Step(
            request_id="",
            content="🐟!",
            n_tokens=3,
            logprobs=[
                token(whole[:2], -1.0, (b"x", -0.25)),
                token(whole[2:], 0.0),
                token(b"!", float("-inf"), (b"?", -9999.0)),
            ],
        ),
        Step(request_id="", logprobs=[token(b"", -3.0)]),
    ]
    return [started(request), *steps, finished(request, tokens=5)]


EXPECTED: dict[str, Any] = {
    "tokens": ["a", "bytes:\\xf0\\x9f", "bytes:\\x90\\x9f", "!", ""],
    "token_logprobs": [-0.5, -1.0, 0.0, -9999.0, -3.0],
    "top_logprobs": [
        {"a": -0.5, "b": -1.5},
        {"x": -0.25, "bytes:\\xf0\\x9f": -1.0},
        {"bytes:\\x90\\x9f": 0.0},
        {"?": -9999.0, "!": -9999.0},
        {"": -3.0},
    ],
    "text_offset": [0, 1, 1, 2, 3],
}


async def test_whole_answer_has_parallel_lists(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(fish))
    reply = await rig.http.post(COMPLETIONS, json={"prompt": "p", "logprobs": 2, "n": 2})
    for choice in reply.json()["choices"]:
        assert choice["text"] == "a🐟!"
        assert choice["logprobs"] == EXPECTED
    assert [request.n_top_logprobs for request in rig.engine.requests] == [2, 2]


async def test_stream_has_the_same_lists_in_pieces(start_server: StartServer) -> None:
    rig = await start_server(FakeEngine(fish))
    reply = await rig.http.post(COMPLETIONS, json={"prompt": "p", "logprobs": 2, "stream": True})
    choices = [chunk["choices"][0] for chunk in chunks_of(reply.text)]
    assert [choice["text"] for choice in choices] == ["a", "🐟!", "", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert choices[-1]["logprobs"] is None
    for name, values in EXPECTED.items():
        assert [each for choice in choices[:-1] for each in choice["logprobs"][name]] == values


async def test_without_being_asked_for_there_are_none(rig: ServerRig) -> None:
    reply = await rig.http.post(COMPLETIONS, json={"prompt": "p", "logprobs": None})
    assert reply.json()["choices"][0]["logprobs"] is None
    assert rig.engine.requests[0].n_top_logprobs is None


async def test_zero_asks_for_the_chosen_tokens_alone(start_server: StartServer) -> None:
    def one(request: Generate) -> Sequence[Action]:
        only = Step(request_id="", content="a", logprobs=[token(b"a", -0.5)])
        return [started(request), only, finished(request)]

    rig = await start_server(FakeEngine(one))
    reply = await rig.http.post(COMPLETIONS, json={"prompt": "p", "logprobs": 0})
    assert reply.json()["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}]
    assert rig.engine.requests[0].n_top_logprobs == 0


@given(st.binary(), st.data())
def test_offsets_point_into_the_text(text: bytes, data: st.DataObject) -> None:
    """However the bytes are cut into tokens, and tokens into steps."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    tokens = [token(piece, -1.0) for piece in pieces]
    whole = TextLogprobs().convert(tokens)
    split = data.draw(st.integers(0, len(tokens)))
    parts = TextLogprobs()
    halves = [parts.convert(tokens[:split]), parts.convert(tokens[split:])]
    assert all(whole[name] == [*halves[0][name], *halves[1][name]] for name in whole)
    characters = text.decode(errors="replace")
    offsets = whole["text_offset"]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(characters) for offset in offsets)
    for piece, offset in zip(pieces, offsets, strict=True):
        if piece.isascii() and piece:
            assert characters[offset:].startswith(piece.decode())


@given(st.binary())
def test_text_of_a_token_is_text_or_says_that_it_is_bytes(piece: bytes) -> None:
    text = piece_text(piece)
    try:
        assert text == piece.decode()
    except UnicodeDecodeError:
        assert bytes(int(each, 16) for each in text.removeprefix("bytes:").split("\\x")[1:]) == piece


TEXT = st.text(st.characters(exclude_categories=("Cs",)))


@given(st.lists(st.lists(TEXT), min_size=1, max_size=4), st.booleans(), TEXT)
def test_stream_and_whole_answer_hold_the_same_text(
    choices: list[list[str]], include_usage: bool, echo: str
) -> None:
    answer = TextAnswer(
        completion_id="c", created=1, model="m", n_prompts=1, n_per_prompt=len(choices), echoes=[echo]
    )
    encoder = TextChunkEncoder(answer, system_fingerprint="f", include_usage=include_usage)
    builder = TextCompletionBuilder(answer, fingerprint=lambda: "f", with_logprobs=False)
    data = encoder.start()
    for texts in choices:
        for text in texts:
            data += encoder.feed(step(REQUEST, text))
            builder.feed(step(REQUEST, text))
        data += encoder.finish_choice(finished(REQUEST))
        builder.finish_choice(finished(REQUEST))
    data += encoder.finish()
    chunks = chunks_of(data.decode())
    whole = builder.finish()
    for index, texts in enumerate(choices):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in mine) == echo + "".join(texts) == whole["choices"][index]["text"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
    indices = [c["index"] for chunk in chunks for c in chunk["choices"]]
    assert indices == sorted(indices)
    assert sum(not chunk["choices"] for chunk in chunks) == include_usage
    assert whole["usage"]["prompt_tokens"] == 10
    assert whole["usage"]["completion_tokens"] == 2 * len(choices)
