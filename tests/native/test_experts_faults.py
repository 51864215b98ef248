"""A fault of a file, a drive or memory is a typed error for its request; the next good one is right."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from s2moe.engine.native import Library, NativeError, Status
from s2moe.engine.native_experts import Experts, model_layout

from expert_models import write_expert_model
from fault_cases import WAYS
from fault_control import preload_environment
from gguf_bytes import GgufFile, rewrite
from llama_model import LlamaModel
from stored_model import PROMPT, Layout, StoredModel, transcribe

FAULT_CASES = Path(__file__).with_name("fault_cases.py")


@pytest.fixture
def model_copy(expert_model: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a model, to be damaged; returns its first file."""

    def copy(name: str) -> Path:
        first = expert_model(name)
        for file in Layout.of(first).document["files"]:
            shutil.copy(file["path"], tmp_path)
        return tmp_path / first.name

    return copy


@pytest.mark.parametrize(("case", "reader", "io"), WAYS)
def test_while_serving(
    case: str,
    reader: str,
    io: str,
    model_copy: Callable[[str], Path],
    fault_shim: Path,
    tmp_path: Path,
) -> None:
    split = case in ("truncated", "replaced")
    model = model_copy("split-q4_k_m-3" if split else "q4_k_m")
    environment = {**os.environ, **preload_environment(fault_shim, tmp_path / "faults")}
    command = [sys.executable, str(FAULT_CASES), case, str(model), reader, io]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    if "UNSUPPORTED" in result.stderr:
        pytest.skip(result.stderr.splitlines()[-1])
    assert result.returncode == 0, result.stderr[-3000:]


# ── files that are damaged before the start ─────────────────────────────────────────────────────


def refusal(path: Path) -> NativeError:
    """How the store refuses a file; the layout must refuse it alike."""
    library = Library()
    with pytest.raises(NativeError) as of_layout:
        model_layout(library, path)
    with pytest.raises(NativeError) as of_open:
        Experts(library, path)
    assert of_layout.value.status == of_open.value.status == Status.IO
    assert of_layout.value.message == of_open.value.message
    return of_open.value


def test_a_truncated_file_is_refused(model_copy: Callable[[str], Path]) -> None:
    path = model_copy("q4_k_m")
    last = GgufFile.read(path).tensors[-1].name.decode()
    os.truncate(path, path.stat().st_size - 4096)
    error = refusal(path)
    assert path.name in error.message
    assert last in error.message


def test_a_truncated_part_is_refused(model_copy: Callable[[str], Path]) -> None:
    path = model_copy("split-q4_k_m-3")
    second = path.with_name(path.name.replace("00001-of", "00002-of"))
    os.truncate(second, second.stat().st_size // 2)
    error = refusal(path)
    assert second.name in error.message
    assert "blk." in error.message


def test_a_tensor_table_past_the_end_is_refused(model_copy: Callable[[str], Path]) -> None:
    path = model_copy("q4_0")
    file = GgufFile.read(path)
    victim = file.tensor("blk.1.ffn_up_exps.weight")
    for offset in (2**40, 2**63, 2**64 - 32, path.stat().st_size):
        victim.offset = offset
        path.write_bytes(file.encode())
        assert path.name in refusal(path).message


@pytest.mark.parametrize(
    ("content", "name"),
    [(b"", "empty"), (b"GGUF", "magic"), (b"\x7fELF" + bytes(100), "elf"), (b"GGUF" + bytes(20), "version")],
)
def test_what_is_no_gguf_is_refused(content: bytes, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(content)
    assert path.name in refusal(path).message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path / "none.gguf")
    assert "none.gguf" in error.message
    assert "No such file" in error.message


def test_a_folder_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path)


def test_a_missing_part_is_refused(model_copy: Callable[[str], Path]) -> None:
    path = model_copy("split-q4_k_m-3")
    third = path.with_name(path.name.replace("00001-of", "00003-of"))
    third.unlink()
    error = refusal(path)
    assert third.name in error.message
    assert "No such file" in error.message


def test_a_part_of_another_model_is_refused(model_copy: Callable[[str], Path], tmp_path: Path) -> None:
    path = model_copy("split-q4_k_m-3")
    other = write_expert_model(tmp_path / "other", "q8_0", n_files=3)
    number_two = path.name.replace("00001-of", "00002-of")
    shutil.copy(other.with_name(other.name.replace("00001-of", "00002-of")), path.with_name(number_two))
    error = refusal(path)
    assert number_two in error.message or path.name in error.message


def test_parts_in_the_wrong_place_are_refused(model_copy: Callable[[str], Path]) -> None:
    path = model_copy("split-q4_k_m-3")
    second = path.with_name(path.name.replace("00001-of", "00002-of"))
    third = path.with_name(path.name.replace("00001-of", "00003-of"))
    assert third.name in refusal(third).message  # not the first
    shutil.copy(third, second)
    assert second.name in refusal(path).message


def test_a_model_without_experts_has_no_store(tmp_path: Path, model_copy: Callable[[str], Path]) -> None:
    path = model_copy("q4_0")

    def remove_experts(file: GgufFile) -> None:
        file.tensors = [tensor for tensor in file.tensors if b"_exps" not in tensor.name]

    rewrite(path, remove_experts)
    assert model_layout(Library(), path)["layers"] == []
    with pytest.raises(NativeError) as error:
        Experts(Library(), path)
    assert error.value.status == Status.UNSUPPORTED


# ── a router that computes nonsense ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [1, 12], ids=["one expert", "all experts"])
@pytest.mark.parametrize("name", ["q4_0", "gpt-oss-mxfp4", "deepseek2-v3-q4_k"])
def test_router_weights_that_are_no_numbers(
    name: str, rows: int, value: float, model_copy: Callable[[str], Path]
) -> None:
    path = model_copy(name)

    def poison(file: GgufFile) -> None:
        router = file.tensor("blk.1.ffn_gate_inp.weight")
        row = struct.pack("<f", value) * router.dims[0]
        router.data = row * rows + router.data[len(row) * rows :]

    rewrite(path, poison)
    with StoredModel(path) as model:
        for tokens in ([5], PROMPT, [5]):
            with pytest.raises(NativeError) as error:
                model.decode(tokens, position=0)
            assert error.value.status == Status.NUMERIC
            assert "finite" in error.value.message or "router" in error.value.message
            assert model.n_kv == 0


def test_one_bad_token_spoils_only_its_request(model_copy: Callable[[str], Path]) -> None:
    """The embedding of one token is NaN: requests with it fail, others do not, before and after."""
    path = model_copy("q4_0")
    with StoredModel(path) as model:
        expected = transcribe(model)

    def poison(file: GgufFile) -> None:
        embedding = file.tensor("token_embd.weight")
        row = 2 * embedding.dims[0]  # F16
        embedding.data = struct.pack("<e", np.nan) * embedding.dims[0] + embedding.data[row:]

    rewrite(path, poison)
    with StoredModel(path) as model:
        assert transcribe(model) == expected
        n_kv = model.n_kv
        for tokens in ([0], [3, 4, 0, 5], [0] * 20):
            with pytest.raises(NativeError) as error:
                model.decode(tokens, position=n_kv)
            assert error.value.status == Status.NUMERIC
            assert model.n_kv == n_kv
        assert transcribe(model) == expected


def test_the_poisoned_file_is_otherwise_whole(model_copy: Callable[[str], Path]) -> None:
    """Without the poison, rewriting changes nothing."""
    path = model_copy("q4_0")
    with LlamaModel(path, n_ctx=128, n_threads=1) as model:
        expected = model.logits(PROMPT)
    rewrite(path, lambda file: None)
    with LlamaModel(path, n_ctx=128, n_threads=1) as model:
        assert model.logits(PROMPT).tobytes() == expected.tobytes()
