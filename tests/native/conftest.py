"""Random models of each architecture, and libraries to compare with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s2moe.engine.native import Library
from s2moe.engine.native_speculation import N_VERIFY_ROWS, set_batch_invariance

from chat_families import FAMILIES, Family
from expert_models import write_expert_model
from fault_control import build_shim
from gguf_factory import write_random_model
from llama_model import LlamaModel
from stored_model import Layout, StoredModel

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(1, str(REPOSITORY / "tests" / "engine"))  # fakes of the engine's tests


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the random model of a variant at its first use."""
    folder = tmp_path_factory.mktemp("models")

    def path_of(variant: str) -> Path:
        path = folder / f"{variant}.gguf"
        if not path.exists():
            write_random_model(path, variant)
        return path

    return path_of


@pytest.fixture(scope="module")
def model(random_model: Callable[[str], Path]) -> Iterator[LlamaModel]:
    """One whose vocabulary spells any text: for grammars."""
    with LlamaModel(random_model("olmoe")) as opened:
        yield opened


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    """Each family of templates in turn."""
    return FAMILIES[request.param]


@pytest.fixture(scope="session")
def expert_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a model of expert_models.py at its first use. Shared by all tests: do not change it."""
    folder = tmp_path_factory.mktemp("expert-models")
    written: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in written:
            written[name] = write_expert_model(folder, name)
        return written[name]

    return path_of


@pytest.fixture
def open_model(expert_model: Callable[[str], Path]) -> Iterator[Callable[..., StoredModel]]:
    """Opens a stored model: (name, share of the bytes between floor and everything) -> StoredModel."""
    opened: list[StoredModel] = []

    def open_at(name: str, share: float) -> StoredModel:
        path = expert_model(name)
        model = StoredModel(path)
        opened.append(model)
        floor = model.experts.floor_bytes
        model.experts.allocate(floor + int(share * (Layout.of(path).full_bytes - floor)))
        return model

    yield open_at
    for model in opened:
        model.close()


@pytest.fixture(scope="module")
def batch_invariance() -> Iterator[None]:
    """Kernels compute each row of a narrow batch as they compute it alone, while a module is tested."""
    library = Library()
    set_batch_invariance(library, N_VERIFY_ROWS)
    yield
    set_batch_invariance(library, 0)


@pytest.fixture(scope="session")
def fault_shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled fault_shim.c."""
    return build_shim(tmp_path_factory.mktemp("fault-shim"))


@pytest.fixture(scope="session")
def stock_library_dir() -> Path:
    """The unpatched libllama, built with the same flags (minutes at the first use)."""
    command = [sys.executable, "native/build.py", "--variant", "stock"]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return REPOSITORY / "build" / "native" / "stock" / "bin"
