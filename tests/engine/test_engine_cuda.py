"""The engine with slots for experts on a GPU against the engine on the CPU; skipped where there is no GPU.
The same tests run with the CPU in its place, too.

pytest -rP shows by how much the devices differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_rig import EngineProcess
from gpu_rig import MIB, Answered, answered, engines_on_played_gpus, last_cache, load
from greedy_texts import N_TOP, Summary, agreement

from s2moe.engine import messages as wire

N_LAYERS, N_EXPERTS, N_USED = 30, 8, 2
N_TOKENS = 32
SLOTS_BYTES = 60 * MIB
"""Beside what the model needs at least: for about a fifth of the experts."""
TOLERANCE = 0.75
"""Of log probabilities, and so of logits. Kernels round activations in their own ways; where two experts are
nearly as likely, a router may then choose the other. Two kinds of kernels of one CPU differ by up to 0.3 here
and part at ties of up to 0.6."""
TYPICAL_TOLERANCE = 0.1
"""Of half of the tokens."""
LEAST_SAME = 0.2
"""Part of the tokens that are the same before texts part."""
OFF = wire.Speculation(method="off")
QUESTIONS = tuple(
    ("user", text)
    for text in (
        "Tell me a long story about a river and the people who live beside it.",
        "How is bread made?",
        "Why is the sky blue?",
    )
)

Spawn = Callable[[], EngineProcess]
Record = Callable[[str, object], None]


@contextmanager
def engines_on_gpus() -> Iterator[Spawn]:
    """Real ones."""
    started: list[EngineProcess] = []

    def start_one() -> EngineProcess:
        started.append(EngineProcess())
        return started[-1]

    try:
        yield start_one
    finally:
        for engine in started:
            engine.close()


def least_vram_bytes(engine: EngineProcess, model: Path) -> int:
    """Skips where there is no GPU."""
    options = {"vram_budget_bytes": MIB, "speculation": wire.Speculation()}
    fatal = engine.load(model, device="cuda", n_ctx=512, **options)
    assert isinstance(fatal, wire.Fatal)
    if fatal.code in ("device_not_built", "device_unavailable"):
        pytest.skip(fatal.message)
    return int(re.findall(r"give --vram-budget ([0-9]+)MiB or more", fatal.message)[0]) * MIB


@pytest.fixture(scope="module", autouse=True)
def cache_directory(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the engines; the model has been found in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("S2MOE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=["cuda", "host"])
def kind(request: pytest.FixtureRequest) -> str:
    """What computes: a GPU, or the CPU in its place."""
    value: str = request.param
    return value


@pytest.fixture(scope="module")
def gpu(kind: str, driver: Path, tiny_model_path: Path) -> Iterator[EngineProcess]:
    """An engine with fewer slots than experts."""
    with engines_on_gpus() if kind == "cuda" else engines_on_played_gpus(driver) as start:
        vram_bytes = least_vram_bytes(start(), tiny_model_path) + SLOTS_BYTES
        engine = start()
        load(engine, tiny_model_path, vram_budget_bytes=vram_bytes, speculation=wire.Speculation())
        yield engine


@pytest.fixture(scope="module")
def on_cpu(tiny_model_path: Path) -> Iterator[list[Answered]]:
    """What the CPU answers to each question."""
    engine = EngineProcess()
    ready = engine.load(tiny_model_path, n_ctx=512, speculation=wire.Speculation())
    assert isinstance(ready, wire.Ready), ready
    yield answers(engine, OFF)
    engine.close()


@pytest.fixture(scope="module")
def plain(gpu: EngineProcess) -> list[Answered]:
    """What the GPU answers without drafts."""
    return answers(gpu, OFF)


def answers(
    engine: EngineProcess, speculation: wire.Speculation, questions: Sequence[tuple[str, str]] = QUESTIONS
) -> list[Answered]:
    return [
        answered(
            *(engine, question),
            max_tokens=N_TOKENS,
            n_top_logprobs=N_TOP,
            ignore_eos=True,
            speculation=speculation,
        )
        for question in questions
    ]


def compare(reference: list[Answered], others: list[Answered], what: str, record: Record) -> None:
    """Fails unless the texts agree, and reports how far they do."""
    pairs = zip(reference, others, strict=True)
    found = Summary.of([agreement(each.choices, other.choices, TOLERANCE) for each, other in pairs])
    print(f"{what}: {found}")
    record(what, str(found))
    assert found.typical <= TYPICAL_TOLERANCE, found
    assert found.n_same >= LEAST_SAME * found.n_tokens, found


def check_slots(given: list[Answered]) -> None:
    """What the engine reports of its slots fits together. `given`: all that it answered in a time."""
    cache = last_cache(given[-1].stats)
    assert cache.gpu is not None
    assert 0 < cache.gpu.resident_experts <= cache.gpu.capacity_experts < N_LAYERS * N_EXPERTS
    assert cache.gpu.resident_bytes <= cache.gpu.capacity_bytes
    activities = [activity for each in given for activity in each.activities]
    for phase in ("prefill", "decode"):
        lookups = [getattr(each, phase) for each in activities]
        costs = [getattr(each.gpu, phase) for each in activities]
        n_misses = sum(each.misses for each in lookups)
        assert sum(each.demand.n_loads for each in costs) == n_misses > 0
        assert 0 < sum(each.requests for each in costs) <= n_misses + sum(each.prefetched for each in lookups)
        assert sum(each.demand.n_bytes for each in costs) > 0
        assert sum(each.synchronizations for each in costs) > 0
        assert sum(each.stall_seconds for each in lookups) > 0
    assert sum(each.gpu.evictions for each in activities) > 0
    assert sum(each.read_errors for each in activities) == 0


def check_speculation(given: list[Answered]) -> None:
    reports = [each.finished.timings.speculation for each in given]
    for report in reports:
        assert report is not None
        assert report.disabled_reason == ""
        assert 0 < report.n_steps <= N_TOKENS
        assert report.n_accepted <= report.n_admitted <= report.n_drafted
        assert report.displaced_weight <= report.error_budget * report.n_token_layers * 1.00001
    assert sum(report.n_drafted for report in reports if report is not None) > 0
    assert sum(report.n_accepted for report in reports if report is not None) > 0


def test_greedy_texts_are_the_cpus(
    plain: list[Answered], on_cpu: list[Answered], record_property: Record
) -> None:
    compare(on_cpu, plain, "slots against the CPU", record_property)
    check_slots(plain)
    for each in plain:
        decode = each.finished.timings.decode_experts
        assert decode is not None
        assert decode.n_lookups == each.finished.timings.n_decode_steps * N_LAYERS * N_USED
        assert 0 < decode.stall_seconds < each.finished.timings.decode_seconds


def test_exact_drafts_do_not_change_the_text(
    gpu: EngineProcess, plain: list[Answered], on_cpu: list[Answered], record_property: Record
) -> None:
    given = answers(gpu, wire.Speculation(preset="exact", adaptive=False))
    compare(plain, given, "exact drafts against none", record_property)
    compare(on_cpu, given, "slots and exact drafts against the CPU", record_property)
    check_slots(given)
    check_speculation(given)


def test_balanced_drafts_work(gpu: EngineProcess, plain: list[Answered]) -> None:
    given = answers(gpu, wire.Speculation(preset="balanced", adaptive=False))
    assert all(len(each.choices) == N_TOKENS and each.text.strip() for each in given)
    check_slots(given)
    check_speculation(given)
    reports = [each.finished.timings.speculation for each in given]
    assert sum(report.n_biased_rows for report in reports if report is not None) > 0
    # and leave nothing behind
    agreement(plain[-1].choices, answers(gpu, OFF, QUESTIONS[-1:])[0].choices, TOLERANCE)
