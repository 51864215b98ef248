"""A model file that is damaged while it is served, or holds what is no number: the engine says so."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_rig import Chat, EngineProcess

from s2moe.engine import messages as wire

from expert_models import write_expert_model
from gguf_bytes import GgufFile, rewrite

BUDGET_BYTES = 300 << 20
"""About a quarter of the experts of the tiny demo model fit beside the rest."""
RIVER = ("user", "Tell me a long story about a river and the people who live beside it.")
FRANCE = ("user", "What is the capital of France?")

Spawn = Callable[[], EngineProcess]


def serve(engine: EngineProcess, model: Path) -> Chat:
    # direct reads would have to wait until the copy is on the drive
    ready = engine.load(
        model, n_ctx=512, memory_budget_bytes=BUDGET_BYTES, io="buffered", n_threads=1
    )  # one thread: two are slow where other processes want the processors
    assert isinstance(ready, wire.Ready), ready
    return Chat(engine)


def test_file_truncated_while_serving(spawn: Spawn, tiny_model_path: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(tiny_model_path, model)
    status = model.stat()
    chat = serve(spawn(), model)
    chat.ask(RIVER, max_tokens=12)
    chat.ask(FRANCE, max_tokens=4)
    expected, _ = chat.ask(RIVER, max_tokens=12)

    os.truncate(model, status.st_size // 2)
    for _ in range(2):
        failed = chat.fail(FRANCE)
        assert failed.code == "model_file_error"
        assert model.name in failed.message
        chat.wait_idle()

    with tiny_model_path.open("rb") as whole, model.open("r+b") as damaged:
        whole.seek(status.st_size // 2)
        damaged.seek(status.st_size // 2)
        shutil.copyfileobj(whole, damaged, 1 << 20)
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    text, _ = chat.ask(RIVER, max_tokens=12)
    assert text == expected
    assert len(text) > 20


# ── numbers that are none ───────────────────────────────────────────────────────────────────────


@pytest.fixture
def poisoned(tmp_path: Path) -> Callable[[str, int], Path]:
    """A random model whose tensor `name` is NaN in its first `n_values` values (0: in all), in F16 or F32."""

    def poison(name: str, n_values: int) -> Path:
        path = write_expert_model(tmp_path, "f16")

        def change(file: GgufFile) -> None:
            tensor = file.tensor(name)
            value = struct.pack("<f" if name.endswith("gate_inp.weight") else "<e", float("nan"))
            n_bytes = n_values * len(value) or len(tensor.data)
            tensor.data = value * (n_bytes // len(value)) + tensor.data[n_bytes:]

        rewrite(path, change)
        return path

    return poison


def test_router_of_no_numbers_is_refused_at_the_start(
    spawn: Spawn, poisoned: Callable[[str, int], Path]
) -> None:
    fatal = spawn().load(
        poisoned("blk.1.ffn_gate_inp.weight", 1), n_ctx=512, memory_budget_bytes=BUDGET_BYTES
    )
    assert isinstance(fatal, wire.Fatal), fatal
    assert fatal.code == "model_invalid"
    assert not fatal.retryable


def test_experts_of_no_numbers_fail_the_start_or_the_request(
    spawn: Spawn, poisoned: Callable[[str, int], Path]
) -> None:
    """They are not read at the start, but for what the first decode uses."""
    engine = spawn()
    last = engine.load(poisoned("blk.1.ffn_down_exps.weight", 0), n_ctx=512, memory_budget_bytes=BUDGET_BYTES)
    if isinstance(last, wire.Fatal):
        assert last.code == "warmup_failed"
        assert "finite" in last.message
        return
    failed = Chat(engine).fail(RIVER)
    assert failed.code == "numeric_error"


def test_one_expert_of_no_numbers_fails_requests_and_not_the_engine(
    spawn: Spawn, poisoned: Callable[[str, int], Path]
) -> None:
    """The first decode is spared: it does not use it."""
    engine = spawn()
    ready = engine.load(
        poisoned("blk.2.ffn_up_exps.weight", 256 * 256),
        n_ctx=512,
        memory_budget_bytes=BUDGET_BYTES,
        speculation=wire.Speculation(),
    )
    assert isinstance(ready, wire.Ready), ready
    chat = Chat(engine)
    for method in ("off", "s2moe"):
        failed = chat.fail(RIVER, speculation=wire.Speculation(method=method))
        assert failed.code == "numeric_error"
        # what was done until then is accounted for
        assert failed.timings.prefill_seconds > 0
        report = failed.timings.speculation
        assert (None if report is None else report.method) == (None if method == "off" else method)
        chat.wait_idle()
