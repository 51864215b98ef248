"""The pure encoders, over arbitrary texts and chunkings."""

from __future__ import annotations

import json

from fake_engine import finished, step
from hypothesis import given
from hypothesis import strategies as st
from server_rig import chunks_of, events_of

from s2moe.engine.messages import Finished, Generate, Timings
from s2moe.server.stream.chat_chunks import ChatChunkEncoder
from s2moe.server.stream.chat_completion import ChatCompletionBuilder
from s2moe.server.stream.usage import timings_of

REQUEST = Generate(request_id="r", messages_json=b"[]")
TEXT = st.text(st.characters(exclude_categories=("Cs",)))


@given(st.lists(st.tuples(TEXT, TEXT)), st.booleans(), TEXT)
def test_stream_and_whole_answer_hold_the_same_text(
    steps: list[tuple[str, str]], include_usage: bool, model: str
) -> None:
    encoder = ChatChunkEncoder(
        completion_id="c", created=1, model=model, system_fingerprint="f", include_usage=include_usage
    )
    builder = ChatCompletionBuilder(completion_id="c", created=1, model=model, fingerprint=lambda: "f")
    data = encoder.start()
    for content, reasoning in steps:
        event = step(REQUEST, content, reasoning=reasoning)
        data += encoder.feed(event)
        builder.feed(event)
    data += encoder.finish_choice(finished(REQUEST)) + encoder.finish()
    builder.finish_choice(finished(REQUEST))
    text = data.decode()
    assert text.endswith("\n\ndata: [DONE]\n\n")
    assert events_of(text)[-1] == "[DONE]"
    chunks = chunks_of(text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    whole = builder.finish()["choices"][0]["message"]
    assert "".join((delta.get("content") or "") for delta in deltas) == whole["content"]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == whole.get(name, "")
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    assert all(not ("content" in delta and "reasoning" in delta) for delta in deltas)
    assert {chunk["model"] for chunk in chunks} == {model}
    assert len(chunks) == len(deltas) + include_usage


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
)
def test_timings_are_finite_numbers(
    computed: int, cached: int, generated: int, prefill: float, decode: float
) -> None:
    timings = timings_of(
        Finished(
            request_id="r",
            reason="stop",
            n_prompt_tokens=computed + cached,
            n_cached_tokens=cached,
            n_completion_tokens=generated,
            timings=Timings(prefill_seconds=prefill, decode_seconds=decode),
        )
    )
    json.dumps(timings, allow_nan=False)
    assert min(timings.values()) >= 0
    assert timings["prompt_n"] == computed
