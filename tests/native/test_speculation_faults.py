"""A step that fails is a typed error and leaves KV cache and sampler as they were; a failed draft is none."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from s2moe.engine.native import AbortSwitch, NativeError, Status

from expert_models import variant_of
from fault_control import preload_environment
from gguf_bytes import GgufFile, rewrite
from speculation_fault_cases import CASES
from speculation_model import (
    EXACT,
    Run,
    SpeculationModel,
    assert_same,
    kv_bytes,
    last_positions,
    plain_answer,
)
from stored_model import PROMPT

pytestmark = pytest.mark.usefixtures("batch_invariance")

FAULT_CASES = Path(__file__).with_name("speculation_fault_cases.py")


@pytest.mark.parametrize("name", ["q4_k_m", "gpt-oss-mxfp4"])
@pytest.mark.parametrize("case", CASES)
def test_faults_of_the_drive(
    case: str, name: str, expert_model: Callable[[str], Path], fault_shim: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, **preload_environment(fault_shim, tmp_path / "faults")}
    command = [sys.executable, str(FAULT_CASES), case, str(expert_model(name))]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr[-3000:]


# ── abort ───────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def storm(switch: AbortSwitch) -> Iterator[None]:
    """Another thread throws the switch at any moment and takes it back."""
    done = threading.Event()
    pauses = random.Random(1)

    def blow() -> None:
        while not done.is_set():
            switch.request()
            time.sleep(0.0003)
            switch.clear()
            time.sleep(pauses.uniform(0, 0.008))

    thread = threading.Thread(target=blow)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        switch.clear()


def step_status(run: Run, n_max: int) -> Status:
    try:
        run.step(n_max)
    except NativeError as error:
        return error.status
    return Status.OK


@pytest.mark.parametrize("options", [EXACT, EXACT | {"draft_experts": 3}, {"method": "cascade"}], ids=str)
def test_aborts_at_any_moment(options: dict[str, object], expert_model: Callable[[str], Path]) -> None:
    sampling = {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.5}
    n_tokens, n_aborted, n_stepped = 60, 0, 0
    with SpeculationModel(expert_model("q4_k_m"), share=0.3) as model:
        expected = plain_answer(model, PROMPT, n_tokens, sampling)
        run = Run(model, PROMPT, options, sampling)
        switch = AbortSwitch(model.library, model.context)
        with storm(switch):
            deadline = time.monotonic() + 10
            while len(run.answer.tokens) < n_tokens:
                before, positions = kv_bytes(model), last_positions(model)
                status = step_status(run, n_tokens - len(run.answer.tokens))
                if time.monotonic() > deadline or (n_aborted > 50 and n_stepped > 3):
                    break
                if status == Status.OK:
                    n_stepped += 1
                    continue
                assert status == Status.ABORTED
                assert last_positions(model) == positions
                assert kv_bytes(model) == before
                n_aborted += 1
        assert n_aborted > 0
        while len(run.answer.tokens) < n_tokens:
            run.step(n_tokens - len(run.answer.tokens))
        answer = run.close()
        assert_same(answer, expected)
        assert answer.report["disabled_reason"] == "", "an abort is no failure of drafts"
        llama_cpp.llama_set_abort_callback(model.context, llama_cpp.ggml_abort_callback(0), None)
        switch.close()


def test_a_step_under_a_thrown_switch(expert_model: Callable[[str], Path]) -> None:
    """It neither drafts nor evaluates, and the next one goes on."""
    with SpeculationModel(expert_model("q4_k_m")) as model:
        expected = plain_answer(model, PROMPT, 12)
        run = Run(model, PROMPT, EXACT)
        switch = AbortSwitch(model.library, model.context)
        while len(run.answer.tokens) < 12:
            switch.request()
            with pytest.raises(NativeError) as error:
                run.step(12)
            assert error.value.status == Status.ABORTED
            switch.clear()
            run.step(12 - len(run.answer.tokens))
        assert_same(run.close(), expected)
        llama_cpp.llama_set_abort_callback(model.context, llama_cpp.ggml_abort_callback(0), None)
        switch.close()


# ── the end of the context, of the answer, of the text ──────────────────────────────────────────


@pytest.mark.parametrize("n_draft_experts", [0, 3])
def test_drafts_shrink_at_the_end_of_the_context(
    n_draft_experts: int, expert_model: Callable[[str], Path]
) -> None:
    with SpeculationModel(expert_model("q4_k_m"), share=0.5) as model:
        n_ctx = llama_cpp.llama_n_ctx(model.context)
        prompt = [40 + (7 * i) % 200 for i in range(n_ctx - 20)]
        expected = plain_answer(model, prompt, 21)
        assert model.n_kv == n_ctx
        run = Run(model, prompt, EXACT | {"draft_experts": n_draft_experts})
        while len(run.answer.tokens) < 21:
            run.step(21 - len(run.answer.tokens) + 5)
            assert model.n_kv <= n_ctx
        assert model.n_kv == n_ctx
        before = kv_bytes(model)
        for _ in range(2):
            with pytest.raises(NativeError) as error:
                run.step()
            assert error.value.status == Status.CONTEXT_FULL
            assert kv_bytes(model) == before
            assert last_positions(model) == [n_ctx - 1] + [-1] * 7
        answer = run.close()
        assert_same(answer, expected)
        assert answer.report["n_admitted"] > 0


def test_an_answer_ends_at_the_token_that_ends_generation(
    expert_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Inside a step: what was drafted behind it is dropped, though it would have been right."""
    path = tmp_path / "model.gguf"
    shutil.copy(expert_model("q4_k_m"), path)
    with SpeculationModel(path) as model:
        text = plain_answer(model, PROMPT, 24).tokens
    firsts = [i for i, token in enumerate(text) if token not in text[:i]]
    ended_inside = 0
    for end in firsts[1:5]:
        rewrite(path, lambda file, token=text[end]: file.set_uint32("tokenizer.ggml.eos_token_id", token))
        with SpeculationModel(path) as model:
            run = Run(model, PROMPT, EXACT | {"draft_experts": variant_of("q4_k_m").n_expert_used})
            while text[end] not in run.answer.tokens:
                tokens = run.step()
            assert run.answer.tokens == text[: end + 1]
            assert last_positions(model) == [len(PROMPT) - 1 + end] + [-1] * 7
            ended_inside += 1 < len(tokens) <= 4  # a full step of the forced tree has 5 tokens
            run.close()
    assert ended_inside > 0


# ── drafts that fail ────────────────────────────────────────────────────────────────────────────


def test_a_draft_of_a_damaged_token_is_no_error(expert_model: Callable[[str], Path], tmp_path: Path) -> None:
    """A token whose embedding is no number is drafted, but never chosen."""
    options = EXACT | {"draft_experts": variant_of("q4_0").n_expert_used}
    n_tokens = 24
    path = tmp_path / "model.gguf"
    shutil.copy(expert_model("q4_0"), path)
    with SpeculationModel(path) as model:
        expected = plain_answer(model, PROMPT, n_tokens)
        steps = model.answer(PROMPT, n_tokens, options).steps
    # in the forced tree, the second best token behind a root is a sibling of the best
    rows_of_roots = [expected.rows[i] for i in itertools.accumulate(steps[:-1])]
    second_best = [int(np.argsort(-row)[1]) for row in rows_of_roots]
    victim = next(token for token in second_best if token not in [*expected.tokens, *PROMPT])

    def poison(file: GgufFile) -> None:
        embedding = file.tensor("token_embd.weight")
        n_embd = embedding.dims[0]
        begin = 2 * n_embd * victim  # F16
        nans = struct.pack("<e", np.nan) * n_embd
        embedding.data = embedding.data[:begin] + nans + embedding.data[begin + 2 * n_embd :]

    rewrite(path, poison)
    with SpeculationModel(path) as model:
        answer = model.answer(PROMPT, n_tokens, options)
        assert_same(answer, expected)
        assert answer.report["disabled_reason"] == "error"
        assert answer.report["disabled_detail"]
        assert last_positions(model)[1:] == [-1] * 7
        run = Run(model, [*PROMPT, victim], EXACT)
        before = kv_bytes(model)
        with pytest.raises(NativeError) as error:
            run.step()
        assert error.value.status == Status.NUMERIC
        assert kv_bytes(model) == before
        run.close()
