"""Engines with slots for experts on a GPU, which a real one or the CPU plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine_rig import Chat, EngineProcess
from fake_driver import RTX_4090, driver_environment

from s2moe.engine import messages as wire
from s2moe.engine.cuda_driver import CudaDevice

MIB = 1 << 20
SLOTS_ENGINE = Path(__file__).with_name("slots_engine.py")
QUESTION = ("user", "Tell me a long story about a river and the people who live beside it.")

Start = Callable[..., EngineProcess]


@contextmanager
def engines_on_played_gpus(driver: Path) -> Iterator[Start]:
    """Gives a function that starts an engine with the CPU in the place of GPUs, and ends what it started.
    `driver`: as build_driver() returns it."""
    engines: list[EngineProcess] = []

    def start_one(
        *gpus: CudaDevice, slots: str = "host", free_bytes: int = 1 << 30, whole_room_bytes: int = 0
    ) -> EngineProcess:
        """`slots`: what the library calls the device; `free_bytes`: of each GPU; `whole_room_bytes`: what a
        model that is loaded as a whole may take, 0 = anything."""
        engine = EngineProcess(
            program=(str(SLOTS_ENGINE), slots, str(free_bytes), str(whole_room_bytes)),
            environment={"LD_LIBRARY_PATH": str(driver.parent), **driver_environment(gpus or (RTX_4090,))},
        )
        engines.append(engine)
        return engine

    try:
        yield start_one
    finally:
        for engine in engines:
            engine.close()


def load(engine: EngineProcess, model: Path, **options: object) -> wire.Ready:
    ready = engine.load(model, device="cuda", n_ctx=512, **options)
    assert isinstance(ready, wire.Ready), ready
    return ready


def refusal(engine: EngineProcess, model: Path, **options: object) -> wire.Fatal:
    fatal = engine.load(model, device="cuda", n_ctx=512, **options)
    assert isinstance(fatal, wire.Fatal)
    return fatal


@dataclass(frozen=True)
class Answered:
    """One answer, and what the engine reported meanwhile."""

    text: str
    finished: wire.Finished
    stats: list[wire.EngineStats]
    choices: list[wire.TokenLogprob]
    """Empty unless n_top_logprobs was asked for."""

    @property
    def activities(self) -> list[wire.ExpertActivity]:
        return [each.experts for each in self.stats if each.experts is not None]


def answered(
    engine: EngineProcess, question: tuple[str, str] = QUESTION, *, max_tokens: int = 40, **options: object
) -> Answered:
    engine.send(Chat(engine).request(question, max_tokens=max_tokens, **options))
    received = engine.receive_until(wire.Finished, wire.Failed)
    finished = received[-1]
    assert isinstance(finished, wire.Finished), finished
    steps = [each for each in received if isinstance(each, wire.Step)]
    return Answered(
        text="".join(each.content for each in steps),
        finished=finished,
        stats=[each for each in received if isinstance(each, wire.EngineStats)],
        choices=[choice for each in steps for choice in each.logprobs],
    )


def answer(engine: EngineProcess, **options: object) -> tuple[str, wire.Finished, list[wire.EngineStats]]:
    given = answered(engine, **options)  # type: ignore[arg-type]
    return given.text, given.finished, given.stats


def last_cache(stats: Sequence[wire.EngineStats]) -> wire.ExpertCache:
    cache = stats[-1].expert_cache
    assert cache is not None
    return cache
