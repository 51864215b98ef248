"""Conversations that alternate in a real engine: the same bits, and less to evaluate."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from engine_rig import Chat, EngineProcess

from s2moe.engine import messages as wire
from s2moe.engine.memory import MIB
from s2moe.engine.messages import Configure, Speculation
from s2moe.engine.model import Model

from gguf_factory import write_random_model
from undraftable_models import write_dense_model, write_hybrid_model

Spawn = Callable[[], EngineProcess]

N_BATCH = 64
A = [40 + (7 * i) % 200 for i in range(150)]
B = [41 + (11 * i) % 190 for i in range(130)]
REST = [50 + (3 * i) % 180 for i in range(40)]
WINDOWED = ("gpt-oss",)
PLAIN = ("olmoe", "qwen3moe", "deepseek2-lite", "deepseek2-lite-2024", "dense")
LONG_A = "Tell me a story about the old lighthouse keeper. " * 8
LONG_B = "Name the colours of the rainbow, one after the other. " * 8
SAMPLINGS = [wire.Sampling(temperature=0), wire.Sampling(temperature=0.9, seed=11)]


def write_model(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    if name == "hybrid":
        return write_hybrid_model(path)
    if name == "dense":
        return write_dense_model(path)
    write_random_model(path, name)
    return path


def load(path: Path, **options: Any) -> Model:
    options.setdefault("speculation", Speculation(method="off"))
    configure = Configure(
        model_path=str(path), n_ctx=512, n_batch=N_BATCH, n_threads=1, keep_expert_counts=False, **options
    )
    return Model(configure, lambda _phase, _fraction: None)


def prefill(model: Model, prompt: list[int]) -> tuple[int, bytes]:
    """How many tokens were reused, and the bits of the last one's logits."""
    n_reused = model.reuse_prefix(prompt, exact=True)
    for begin in range(n_reused, len(prompt), model.n_batch):
        model.decode(prompt[begin : begin + model.n_batch])
    row = llama_cpp.llama_get_logits_ith(model.context, -1)
    return n_reused, np.ctypeslib.as_array(row, shape=(model.info.n_vocab,)).tobytes()


def rows_of(model: Model) -> bytes:
    """What the KV cache holds, positions in the order of cells included."""
    n_bytes = llama_cpp.llama_state_seq_get_size(model.context, 0)
    data = np.zeros(n_bytes, dtype=np.uint8)
    pointer = data.ctypes.data_as(llama_cpp.llama_cpp.ctypes.POINTER(llama_cpp.llama_cpp.ctypes.c_uint8))
    assert llama_cpp.llama_state_seq_get_data(model.context, pointer, n_bytes, 0) == n_bytes
    return data.tobytes()


@pytest.fixture(params=[*PLAIN, *WINDOWED, "hybrid"])
def models(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Model, Model]]:
    """The name of a model, itself with a prompt cache, and without."""
    path = write_model(tmp_path, request.param)
    pair = load(path, prompt_cache_bytes=64 * MIB), load(path, prompt_cache_bytes=0)
    yield (request.param, *pair)
    for model in pair:
        model.close()


def test_restored_conversation_goes_on_bit_by_bit(models: tuple[str, Model, Model]) -> None:
    name, cached, fresh = models
    assert prefill(cached, A) == prefill(fresh, A)
    prefill(cached, B)
    n_reused, logits = prefill(cached, A + REST)
    # the rows of a window are kept without the prompt's last token, which is evaluated again for its logits
    assert n_reused == len(A) - (name in WINDOWED)
    if name in WINDOWED:
        assert fresh.reuse_prefix([*A[:n_reused], 0], exact=True) == n_reused
    assert prefill(fresh, A + REST) == (n_reused, logits)
    assert rows_of(cached) == rows_of(fresh)
    # and once more, with what was added since
    prefill(cached, B)
    n_reused, logits = prefill(cached, A + REST + REST)
    assert n_reused == len(A + REST) - (name in WINDOWED)
    if name in WINDOWED:
        fresh.reuse_prefix([*(A + REST)[:n_reused], 0], exact=True)
    assert prefill(fresh, A + REST + REST) == (n_reused, logits)


def test_part_of_a_snapshot_is_used_where_rows_can_be_cut(models: tuple[str, Model, Model]) -> None:
    name, cached, fresh = models
    prefill(cached, A)
    prefill(cached, B)
    n_reused, logits = prefill(cached, A[:100] + REST)
    assert n_reused == (100 if name in PLAIN else 0)
    prefill(fresh, A)
    expected_reused, expected = prefill(fresh, A[:100] + REST)
    if name in PLAIN:
        assert (n_reused, logits) == (expected_reused, expected)
    else:
        # evaluated from the start
        fresh.forget()
        assert prefill(fresh, A[:100] + REST) == (0, logits)


def test_snapshots_take_what_is_said_and_are_given_back(tmp_path: Path) -> None:
    model = load(write_model(tmp_path, "qwen3moe"), prompt_cache_bytes=64 * MIB)
    prefill(model, A)
    n_bytes = llama_cpp.llama_state_seq_get_size(model.context, 0)
    prefill(model, B)
    cache = model.prompt_cache
    assert cache.n_entries == 1
    assert n_bytes <= cache.n_bytes <= n_bytes + 4096 + 4 * len(A)
    pools = {pool.pool: pool for pool in model.memory_pools()}
    assert pools["prompt_cache"].used_bytes == cache.n_bytes
    assert pools["prompt_cache"].budget_bytes == 64 * MIB
    assert cache.drop(1) > 0
    assert cache.n_bytes == 0
    model.close()


# whole engines


def ask(chat: Chat, content: str, **options: object) -> tuple[str, wire.Finished]:
    options.setdefault("max_tokens", 24)
    return chat.ask(("user", content), **options)


def load_engine(spawn: Spawn, path: Path, **options: object) -> Chat:
    options.setdefault("prompt_cache_bytes", 64 * MIB)
    engine = spawn()
    ready = engine.load(path, n_ctx=1024, n_batch=128, **options)
    assert isinstance(ready, wire.Ready), ready
    return Chat(engine)


def stats_of_request(chat: Chat, content: str) -> tuple[wire.Finished, Counter[str], wire.EngineStats]:
    """Its end, the events of the prompt cache since the last report, and the last report."""
    chat.engine.send(chat.request(("user", content), max_tokens=8))
    received = chat.engine.receive_until(wire.Finished, wire.Failed)
    assert isinstance(received[-1], wire.Finished), received[-1]
    stats = [message for message in received if isinstance(message, wire.EngineStats)]
    events = Counter[str]()
    for each in stats:
        events.update(each.prompt_cache_events)
    return received[-1], events, stats[-1]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seed"])
@pytest.mark.parametrize("method", ["off", "s2moe"])
def test_answers_are_those_of_a_conversation_that_was_never_left(
    spawn: Spawn, tiny_model_path: Path, sampling: wire.Sampling, method: str
) -> None:
    speculation = wire.Speculation(method=method, exact=True if method != "off" else None)
    alternating, faithful = (
        load_engine(spawn, tiny_model_path, speculation=speculation, prompt_cache_bytes=n_bytes)
        for n_bytes in (64 * MIB, 0)
    )
    expected = [ask(faithful, LONG_A, sampling=sampling), ask(faithful, LONG_A + "Go on!", sampling=sampling)]
    first = ask(alternating, LONG_A, sampling=sampling)
    ask(alternating, LONG_B, sampling=sampling)
    second = ask(alternating, LONG_A + "Go on!", sampling=sampling)
    assert [first[0], second[0]] == [expected[0][0], expected[1][0]]
    assert second[1].n_cached_tokens == expected[1][1].n_cached_tokens > 60


def test_two_conversations_alternate_and_reports_say_so(spawn: Spawn, tiny_model_path: Path) -> None:
    chat = load_engine(spawn, tiny_model_path)
    stats_of_request(chat, LONG_A)
    _, events, _ = stats_of_request(chat, LONG_B)
    assert events["saved"] == 1
    for turn in range(1, 4):
        for content in (LONG_A, LONG_B):
            finished, events, stats = stats_of_request(chat, content + "More. " * turn)
            assert finished.n_cached_tokens > 0.8 * (finished.n_prompt_tokens - 4 * turn)
            assert events["restored"] == 1
    assert stats.prompt_cache_entries >= 2
    assert 0 < stats.prompt_cache_bytes <= 64 * MIB
    pools = {pool.pool: pool for pool in stats.memory_pools}
    assert pools["prompt_cache"].used_bytes == stats.prompt_cache_bytes


def test_model_with_all_experts_resident_has_a_prompt_cache(spawn: Spawn, tiny_model_path: Path) -> None:
    chat = load_engine(spawn, tiny_model_path, prompt_cache_bytes=-1)
    stats_of_request(chat, LONG_A)
    stats_of_request(chat, LONG_B)
    finished, events, _ = stats_of_request(chat, LONG_A)
    assert finished.n_cached_tokens == finished.n_prompt_tokens - 1
    assert events["restored"] == 1


def test_size_that_does_not_fit_is_refused(spawn: Spawn, tiny_model_path: Path) -> None:
    budget = {"memory_budget_bytes": 320 * MIB}
    fatal = spawn().load(tiny_model_path, n_ctx=512, prompt_cache_bytes=300 * MIB, **budget)
    assert isinstance(fatal, wire.Fatal)
    assert (fatal.code, fatal.retryable) == ("budget_too_small", False)
    assert "a smaller --prompt-cache-size" in fatal.message


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"prompt_cache_bytes": 0}, "invalid_setting"),
        (
            {"prompt_cache_bytes": 8 * MIB, "prompt_cache_dir": "/proc/self/nothing"},
            "prompt_cache_dir_unusable",
        ),
    ],
)
def test_directory_of_no_use_is_refused(
    spawn: Spawn, tiny_model_path: Path, tmp_path: Path, options: dict[str, Any], code: str
) -> None:
    fatal = spawn().load(tiny_model_path, n_ctx=512, **({"prompt_cache_dir": str(tmp_path)} | options))
    assert isinstance(fatal, wire.Fatal)
    assert fatal.code == code
    assert "--prompt-cache-dir" in fatal.message


def end(chat: Chat) -> str:
    """Returns the engine's log."""
    chat.engine.send(wire.Shutdown())
    with contextlib.suppress(EOFError):
        while True:
            chat.engine.receive()
    assert chat.engine.process.wait(20) == 0
    assert chat.engine.process.stderr is not None
    return chat.engine.process.stderr.read().decode()


def test_next_run_takes_conversations_up(spawn: Spawn, tiny_model_path: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = load_engine(spawn, tiny_model_path, prompt_cache_dir=str(kept))
    stats_of_request(first, LONG_A)
    stats_of_request(first, LONG_B)
    logs = end(first)
    files = sorted(kept.iterdir())
    assert len(files) == 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}

    # another context, and a file that is damaged
    second = load_engine(spawn, tiny_model_path, prompt_cache_dir=str(kept))
    finished, events, _ = stats_of_request(second, LONG_A)
    assert finished.n_cached_tokens == finished.n_prompt_tokens - 1
    assert (events["loaded"], events["restored"]) == (1, 1)
    logs += end(second)
    for file in kept.iterdir():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    third = load_engine(spawn, tiny_model_path, prompt_cache_dir=str(kept))
    finished, events, _ = stats_of_request(third, LONG_A)
    assert finished.n_cached_tokens == 0
    assert events["failed"] >= 1
    logs += end(third)
    assert "damaged" in logs
    assert "lighthouse" not in logs
    assert "rainbow" not in logs


def test_other_context_size_reads_the_same_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path, "qwen3moe")
    options = {"prompt_cache_bytes": 64 * MIB, "prompt_cache_dir": str(tmp_path / "kept")}
    first = load(path, **options)
    prefill(first, A)
    first.close()
    configure = Configure(
        model_path=str(path),
        n_ctx=256,
        n_batch=N_BATCH,
        n_threads=1,
        keep_expert_counts=False,
        speculation=Speculation(method="off"),
        **options,  # type: ignore[arg-type]
    )
    with caplog.at_level(logging.INFO):
        second = Model(configure, lambda _phase, _fraction: None)
    assert prefill(second, A + REST)[0] == len(A)
    second.close()
    # the same architecture with other weights
    write_random_model(path, "qwen3moe", seed=1)
    third = load(path, **options)
    assert prefill(third, A + REST)[0] == 0
    third.close()
