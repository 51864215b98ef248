"""--device: what serves, and what is refused before anything is loaded."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import EngineProcess
from fake_driver import H100, ORIN, RTX_3060, RTX_4090, build_driver, driver_environment

from s2moe.engine import messages as wire
from s2moe.engine.cpu import processor_name
from s2moe.engine.cuda_driver import LIBRARY_NAME
from s2moe.engine.device import Device, choose_device
from s2moe.engine.errors import EngineStartError
from s2moe.engine.loading import Loader
from s2moe.engine.memory import Footprint
from s2moe.engine.native import Library, LibraryNotFoundError, load_llama_cpp
from s2moe.engine.native_log import NativeLog

ARCHITECTURES = ["87", "89", "90"]
BUILD_INFO = {"cuda": True, "cuda_toolkit": "12.6.85", "cuda_architectures": ARCHITECTURES}
CUDA_ENGINE = Path(__file__).with_name("cuda_engine.py")

Start = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def start(driver: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts engines whose libraries claim to be built for CUDA; `has_driver`: on a machine with a driver."""
    engines: list[EngineProcess] = []
    (tmp_path / LIBRARY_NAME).touch()  # in front of one that the machine may have

    def start_one(*, has_driver: bool = True, **played: object) -> EngineProcess:
        engine = EngineProcess(
            stderr=subprocess.PIPE,
            program=(str(CUDA_ENGINE), ",".join(ARCHITECTURES), "12.6"),
            environment={
                "LD_LIBRARY_PATH": str(driver.parent if has_driver else tmp_path),
                **driver_environment(**played),  # type: ignore[arg-type]
            },
        )
        engines.append(engine)
        return engine

    yield start_one
    for engine in engines:
        if engine.process.stderr is not None:
            engine.process.stderr.close()
        engine.close()


def play(monkeypatch: pytest.MonkeyPatch, *devices: object) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in driver_environment(devices).items():  # type: ignore[arg-type]
        monkeypatch.setenv(name, value)


def test_cpu_asks_no_driver() -> None:
    configure = wire.Configure(model_path="m.gguf")
    device = choose_device(configure, BUILD_INFO, library="/nowhere/libcuda.so.1")
    assert device == Device()
    assert device.to_wire() == [wire.ServingDevice(kind="cpu", name=processor_name())]
    assert "on the CPU" in device.describe()


def test_every_gpu_is_told(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    play(monkeypatch, RTX_4090, H100)
    configure = wire.Configure(model_path="m.gguf", device="cuda")
    device = choose_device(configure, BUILD_INFO, library=str(driver))
    first, second = device.to_wire()
    assert (first.kind, first.name, first.compute_capability) == ("cuda", RTX_4090.name, "8.9")
    assert (second.name, second.total_bytes) == (H100.name, H100.total_bytes)
    line = device.describe()
    for text in (RTX_4090.name, H100.name, "CUDA 12.6"):
        assert text in line


def test_integrated_gpu_beside_another_is_not_used(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    """llama.cpp leaves it out, so it is not told, counted or asked for kernels."""
    play(monkeypatch, replace(ORIN, capability=(7, 2)), RTX_4090)
    configure = wire.Configure(model_path="m.gguf", device="cuda")
    device = choose_device(configure, BUILD_INFO, library=str(driver))
    assert [each.name for each in device.to_wire()] == [RTX_4090.name]
    assert device.total_bytes == RTX_4090.total_bytes


def test_budget_for_a_gpu_needs_one() -> None:
    with pytest.raises(EngineStartError, match=r"^--vram-budget is for --device cuda") as caught:
        choose_device(wire.Configure(model_path="m.gguf", vram_budget_bytes=1), BUILD_INFO)
    assert caught.value.code == "invalid_setting"


def test_build_without_cuda_is_told_apart_from_a_lack_of_a_driver() -> None:
    with pytest.raises(EngineStartError) as caught:
        choose_device(wire.Configure(model_path="m.gguf", device="cuda"), BUILD_INFO | {"cuda": False})
    assert caught.value.code == "device_not_built"
    assert "make cuda" in caught.value.message


@pytest.mark.parametrize(
    ("has_driver", "played", "code", "text"),
    [
        (False, {}, "device_unavailable", "--gpus all"),
        (True, {"devices": [RTX_4090], "version": 11040}, "device_unavailable", "CUDA 11.4"),
        (True, {"devices": []}, "device_unavailable", "the driver shows no GPU"),
        (True, {"devices": [RTX_3060]}, "device_not_built", "CMAKE_CUDA_ARCHITECTURES=86"),
    ],
)
def test_engine_refuses_before_the_model_is_touched(
    start: Start, tmp_path: Path, has_driver: bool, played: dict[str, object], code: str, text: str
) -> None:
    engine = start(has_driver=has_driver, **played)
    fatal = engine.load(tmp_path / "missing.gguf", device="cuda")
    assert isinstance(fatal, wire.Fatal)
    assert (fatal.code, fatal.retryable) == (code, False)
    assert (code in wire.WRONG_SETTING_CODES) == (code != "device_unavailable"), "a driver may appear"
    assert fatal.message.startswith("--device cuda, but ")
    assert fatal.message.endswith(", or use --device cpu")
    assert text in fatal.message
    assert engine.process.wait(10) == 1


def test_engine_does_not_take_the_cpu_where_llama_cpp_has_no_gpu(start: Start, tmp_path: Path) -> None:
    fatal = start(devices=[RTX_4090]).load(tmp_path / "missing.gguf", device="cuda")
    assert isinstance(fatal, wire.Fatal)
    assert fatal.code == "device_unavailable"
    assert "llama.cpp cannot use the GPU" in fatal.message


def test_cpu_serves_where_there_is_a_broken_driver(start: Start, tiny_model_path: Path) -> None:
    ready = start(devices=[RTX_4090], version=9000, init=999).load(tiny_model_path, n_ctx=256)
    assert isinstance(ready, wire.Ready), ready
    assert ready.model.device == "cpu"
    assert [device.kind for device in ready.model.devices] == ["cpu"]
    assert ready.plan is not None


def loader_on(device: Device, model: Path) -> Loader:
    llama_cpp = load_llama_cpp()
    configure = wire.Configure(model_path=str(model))
    return Loader(llama_cpp, Library(), NativeLog(llama_cpp), configure, 1, lambda: Footprint(0, 0), device)


def test_model_gets_no_gpu_unless_one_serves() -> None:
    path = Path("m.gguf")
    on_cpu = loader_on(Device(), path)._model_params(None)
    assert on_cpu.n_gpu_layers == 0
    # an empty list, not the default of none, for which llama.cpp looks for devices itself
    assert ctypes.c_void_p.from_address(on_cpu.devices).value is None
    on_gpu = loader_on(Device((RTX_4090,)), path)._model_params(None)
    assert on_gpu.n_gpu_layers > 100
    assert on_gpu.devices is None


@pytest.mark.parametrize(
    ("needed", "remedy"), [("libcuda.so.99", "--gpus all"), ("libcudart.so.99", "LD_LIBRARY_PATH")]
)
def test_library_that_cannot_be_loaded_without_cuda_says_so(tmp_path: Path, needed: str, remedy: str) -> None:
    source = tmp_path / "empty.c"
    source.write_text("int nothing(void) { return 0; }\n")
    cc = ["cc", "-shared", "-fPIC", "-Wl,--no-as-needed"]
    missing, library = tmp_path / needed, tmp_path / "libs2moe.so"
    subprocess.run([*cc, f"-Wl,-soname,{needed}", "-o", str(missing), str(source)], check=True)
    subprocess.run([*cc, "-o", str(library), str(source), str(missing)], check=True)
    missing.unlink()
    code = "from s2moe.engine.native import Library; Library()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"S2MOE_LIB_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    last = result.stderr.strip().splitlines()[-1]
    assert LibraryNotFoundError.__name__ in last
    assert needed in last
    assert remedy in last


def test_build_says_what_it_is_for() -> None:
    info = Library().build_info()
    if info["cuda"]:
        assert info["cuda_architectures"]
        assert info["cuda_toolkit"]
    else:
        assert (info["cuda_toolkit"], info["cuda_architectures"]) == ("", [])
    assert "CPU : " in Library().describe_build()["system"]
