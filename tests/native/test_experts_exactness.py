"""What a model computes does not depend on where its experts are, how they are read, or how many fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from s2moe.engine.native import Library, NativeError, Status
from s2moe.engine.native_experts import Experts, Io, Reader

from expert_models import EXPERT_MODELS, SPLIT_MODELS, variant_of
from llama_model import LlamaModel
from stored_model import PROMPT, IdArray, Layout, StoredModel, Transcript, transcribe

MODELS = [*EXPERT_MODELS, *SPLIT_MODELS]
SPECULATIVE = 8
"""The widest batch whose logits equal those of single tokens."""


@dataclass(frozen=True)
class Way:
    """How a run gets its experts."""

    capacity: float
    """0 = the floor, 1 = every expert"""
    io: Io
    reader: Reader
    n_threads: int

    def __str__(self) -> str:
        return f"{self.capacity}-{self.io}-{self.reader}-{self.n_threads}"

    def bytes_of(self, layout: Layout, floor_bytes: int) -> int:
        return floor_bytes + int(self.capacity * (layout.full_bytes - floor_bytes))


WAYS = (
    Way(0, "direct", "io_uring", 1),
    Way(0, "direct", "threads", 1),
    Way(0, "buffered", "io_uring", 1),
    Way(0, "buffered", "threads", 1),
    Way(0.4, "direct", "io_uring", 1),
    Way(0.4, "buffered", "threads", 1),
    Way(1, "direct", "io_uring", 1),
)
WAYS_OF_TWO_THREADS = (
    Way(0, "direct", "io_uring", 2),
    Way(0, "buffered", "threads", 2),
    Way(1, "direct", "threads", 2),
)
OF_TWO_THREADS = ["q4_k_m", "gpt-oss-odd", "deepseek2-v3-q4_k"]
"""Fewer: two threads of ggml are slow where other processes want the processors, too."""


@pytest.fixture(scope="session")
def refused(expert_model: Callable[[str], Path]) -> dict[str, str]:
    """The values of `io` and `reader` that this system cannot do, and why."""
    reasons = {}
    library = Library()
    path = expert_model("q4_0")
    for key in ("direct", "io_uring"):
        try:
            io: Io = "direct" if key == "direct" else "buffered"
            reader: Reader = "io_uring" if key == "io_uring" else "threads"
            Experts(library, path, io=io, reader=reader).close()
        except NativeError as error:
            if error.status != Status.UNSUPPORTED:
                raise
            reasons[key] = error.message
    return reasons


@pytest.fixture(scope="module")
def plain(expert_model: Callable[[str], Path]) -> Iterator[Callable[[str, int], Transcript]]:
    """The transcript of a model loaded whole, without the store, its prompt in batches of so many tokens."""
    known: dict[tuple[str, int], Transcript] = {}

    def transcript_of(name: str, width: int) -> Transcript:
        if (name, width) not in known:
            with LlamaModel(expert_model(name), n_ctx=128, n_threads=1) as model:
                known[name, width] = transcribe(model, width=width)
        return known[name, width]

    yield transcript_of
    known.clear()


@pytest.fixture(scope="module")
def resident(expert_model: Callable[[str], Path]) -> Callable[[str], Transcript]:
    """The transcript through a store that holds every expert, the prompt in one batch, computed while hot."""
    known: dict[str, Transcript] = {}

    def transcript_of(name: str) -> Transcript:
        if name not in known:
            path = expert_model(name)
            with StoredModel(path, Layout.of(path).full_bytes, io="buffered", reader="threads") as model:
                transcribe(model)
                known[name] = transcribe(model)
        return known[name]

    return transcript_of


def assert_equal(transcript: Transcript, reference: Transcript) -> None:
    assert np.isfinite(transcript.logits).all()
    assert transcript == reference, transcript.difference(reference)


@pytest.mark.parametrize(
    ("name", "way"),
    [*product(MODELS, WAYS), *product(OF_TWO_THREADS, WAYS_OF_TWO_THREADS)],
    ids=str,
)
def test_logits_are_those_of_the_resident_run(
    name: str,
    way: Way,
    expert_model: Callable[[str], Path],
    resident: Callable[[str], Transcript],
    refused: dict[str, str],
) -> None:
    for key in (way.io, way.reader):
        if key in refused:
            pytest.skip(refused[key])
    path = expert_model(name)
    layout = Layout.of(path)
    with StoredModel(path, io=way.io, reader=way.reader, n_threads=way.n_threads) as model:
        model.experts.allocate(way.bytes_of(layout, model.experts.floor_bytes))
        reader = model.experts.reader()
        assert (reader["io"], reader["reader"]) == (way.io, way.reader)
        assert_equal(transcribe(model), resident(name))
        assert_equal(transcribe(model), resident(name))
        stats = model.experts.stats()
        assert stats.read_errors == 0
        assert stats.evictions == 0 if way.capacity == 1 else stats.evictions > 0


@pytest.mark.parametrize("width", [1, 3, SPECULATIVE])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_a_plain_load(
    name: str, width: int, expert_model: Callable[[str], Path], plain: Callable[[str, int], Transcript]
) -> None:
    with StoredModel(expert_model(name)) as model:
        assert_equal(transcribe(model, width=width), plain(name, width))


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_one_batch_is_close_to_a_plain_load(
    name: str, expert_model: Callable[[str], Path], plain: Callable[[str, int], Transcript]
) -> None:
    """Other kernels may sum in another order there."""
    with StoredModel(expert_model(name)) as model:
        logits = transcribe(model, n_tokens=1).logits[: len(PROMPT)]
    expected = plain(name, len(PROMPT)).logits[: len(PROMPT)]
    assert np.abs(logits - expected).max() < 0.02 * expected.std()


@pytest.mark.skipif(
    "avx512_vnni" not in Path("/proc/cpuinfo").read_text(), reason="the Q4_0 kernel needs AVX-512 VNNI"
)
@pytest.mark.parametrize("name", ["q4_0", "llama-q4_0"])
def test_a_prompt_of_q4_0_in_one_batch_is_that_of_a_plain_load(
    name: str, expert_model: Callable[[str], Path], plain: Callable[[str, int], Transcript]
) -> None:
    """Our own kernel rounds like ggml's row kernel, whatever the width."""
    with StoredModel(expert_model(name)) as model:
        logits = transcribe(model, n_tokens=1).logits[: len(PROMPT)]
    assert np.array_equal(logits, plain(name, len(PROMPT)).logits[: len(PROMPT)])


@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_the_batch_width(name: str, expert_model: Callable[[str], Path]) -> None:
    """What exact speculation stands on."""
    with StoredModel(expert_model(name)) as model:
        single = transcribe(model, width=1)
        for width in (2, 5, SPECULATIVE):
            assert_equal(transcribe(model, width=width), single)


@pytest.mark.parametrize("name", MODELS)
def test_fewer_experts_per_token(name: str, expert_model: Callable[[str], Path]) -> None:
    library = Library()
    path = expert_model(name)
    k = variant_of(name).n_expert_used
    with LlamaModel(path, n_ctx=128, n_threads=1) as whole, StoredModel(path) as stored:
        all_used = transcribe(stored, width=1)
        for n_used in {1, k - 1}:
            library.set_n_expert_used(whole._context, n_used)
            library.set_n_expert_used(stored.context, n_used)
            transcript = transcribe(stored, width=1)
            assert_equal(transcript, transcribe(whole, width=1))
            assert transcript != all_used
        library.set_n_expert_used(stored.context, 0)
        assert_equal(transcribe(stored, width=1), all_used)


@pytest.mark.parametrize("name", MODELS)
def test_recorded_router_ids_are_those_of_a_plain_load(
    name: str, expert_model: Callable[[str], Path]
) -> None:
    library = Library()
    path = expert_model(name)

    def record(model: LlamaModel) -> list[IdArray]:
        library.set_router_recording(model._context, True)
        recorded = []
        for position, token in enumerate(PROMPT):
            model.decode([token], position=position)
            recorded.append(library.router_ids(model._context))
        return recorded

    with LlamaModel(path, n_ctx=128, n_threads=1) as whole, StoredModel(path) as stored:
        for expected, ids in zip(record(whole), record(stored), strict=True):
            np.testing.assert_array_equal(ids, expected)
            assert (ids >= 0).any()


@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-odd", "split-q4_k_m-3"])
def test_two_stores_of_one_file_do_not_meet(
    name: str, expert_model: Callable[[str], Path], resident: Callable[[str], Transcript]
) -> None:
    path = expert_model(name)
    with StoredModel(path) as first, StoredModel(path, Layout.of(path).full_bytes) as second:
        assert_equal(transcribe(first), resident(name))
        assert_equal(transcribe(second), resident(name))
        assert_equal(transcribe(first), resident(name))


@pytest.mark.parametrize("name", OF_TWO_THREADS)
def test_logits_are_those_of_a_plain_load_on_two_threads(
    name: str, expert_model: Callable[[str], Path]
) -> None:
    path = expert_model(name)
    with LlamaModel(path, n_ctx=128, n_threads=2) as whole, StoredModel(path, n_threads=2) as stored:
        assert_equal(transcribe(stored, width=1, n_tokens=8), transcribe(whole, width=1, n_tokens=8))


@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-mxfp4"])
def test_rolling_the_kv_cache_back_and_decoding_again(
    name: str, expert_model: Callable[[str], Path], resident: Callable[[str], Transcript]
) -> None:
    """As a rejected draft does."""
    with StoredModel(expert_model(name)) as model:
        transcript = transcribe(model)
        memory = llama_cpp.llama_get_memory(model.context)
        for _ in range(3):
            model.decode([7, 11, 13, 17], position=len(PROMPT) + 24)
            assert llama_cpp.llama_memory_seq_rm(memory, 0, len(PROMPT), -1)
            for i, token in enumerate(transcript.tokens):
                row = model.decode([token], position=len(PROMPT) + i)[0]
                assert row.tobytes() == resident(name).logits[len(PROMPT) + i].tobytes()
