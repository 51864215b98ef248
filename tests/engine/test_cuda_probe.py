"""Whether CUDA can serve, asked of a driver that plays every machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_driver import H100, ORIN, RTX_3060, RTX_4090, build_driver, driver_environment

from s2moe.engine.cuda_build import CudaBuild
from s2moe.engine.cuda_driver import CudaDevice, CudaDriver, CudaDriverError
from s2moe.engine.cuda_probe import (
    GROUP_OPTION,
    CudaFault,
    CudaProbe,
    CudaUnavailableError,
    Machine,
    probe_cuda,
)

BUILD = CudaBuild(True, (12, 6), ("87", "89", "90"))
DESKTOP = Machine()
JETSON = Machine(l4t=(35, "R35.4.1"))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


class Play:
    """Probes with the driver in the role that it is given."""

    def __init__(self, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._library = library
        self._monkeypatch = monkeypatch

    def probe(
        self,
        devices: Sequence[CudaDevice] = (RTX_4090,),
        *,
        build: CudaBuild = BUILD,
        machine: Machine = DESKTOP,
        version: int = 12060,
        init: int = 0,
    ) -> CudaProbe:
        for name, value in driver_environment(devices, version=version, init=init).items():
            self._monkeypatch.setenv(name, value)
        return probe_cuda(build, machine, str(self._library))

    def refusal(self, *args: Sequence[CudaDevice], **options: object) -> tuple[CudaFault, str]:
        with pytest.raises(CudaUnavailableError) as caught:
            self.probe(*args, **options)  # type: ignore[arg-type]
        message = str(caught.value)
        assert "\n" not in message
        return caught.value.fault, message


@pytest.fixture
def play(driver: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Play(driver, monkeypatch)


def test_gpus_that_can_serve_are_described(play: Play) -> None:
    probe = play.probe([RTX_4090, H100])
    assert probe == CudaProbe((RTX_4090, H100), (12, 6))
    assert probe.devices[0].describe() == "NVIDIA GeForce RTX 4090 (compute capability 8.9, 24.0 GiB)"
    (orin,) = play.probe([ORIN]).devices
    assert orin.describe() == "Orin (compute capability 8.7, 61.4 GiB, shared with the CPU)"


def test_build_without_cuda_asks_no_driver() -> None:
    with pytest.raises(CudaUnavailableError, match="make cuda") as caught:
        probe_cuda(CudaBuild(False), DESKTOP, "/nowhere/libcuda.so.1")
    assert caught.value.fault == CudaFault.NOT_BUILT


@pytest.mark.parametrize(
    ("machine", "remedies"),
    [
        (DESKTOP, ("--gpus all", "--runtime nvidia", "nvidia-smi")),
        (JETSON, ("JetPack 5", "--runtime nvidia")),
    ],
)
def test_missing_driver(machine: Machine, remedies: tuple[str, ...]) -> None:
    with pytest.raises(CudaUnavailableError) as caught:
        probe_cuda(BUILD, machine, "/nowhere/libcuda.so.1")
    assert caught.value.fault == CudaFault.NO_DRIVER
    for text in ("/nowhere/libcuda.so.1", *remedies):
        assert text in str(caught.value)


def test_library_that_is_no_driver() -> None:
    with pytest.raises(CudaUnavailableError) as caught:
        probe_cuda(BUILD, DESKTOP, "libc.so.6")
    assert caught.value.fault == CudaFault.DRIVER_FAILED
    assert "cuDriverGetVersion" in str(caught.value)


def test_stub_of_the_toolkit_is_no_driver(play: Play) -> None:
    fault, message = play.refusal(init=34)
    assert fault == CudaFault.NO_DRIVER
    assert "stub" in message
    assert "LD_LIBRARY_PATH" in message


def test_driver_of_an_older_major_version(play: Play) -> None:
    fault, message = play.refusal(version=11040)
    assert fault == CudaFault.DRIVER_TOO_OLD
    for text in ("CUDA 11.4", "CUDA 12.6", "525 or newer", "rebuild with a toolkit of CUDA 11"):
        assert text in message
    fault, message = play.refusal([ORIN], version=11040, machine=JETSON)
    assert fault == CudaFault.DRIVER_TOO_OLD
    for text in ("L4T R35.4.1", "JetPack 5", "a JetPack that has CUDA 12"):
        assert text in message


def test_old_driver_is_named_also_where_it_does_not_start(play: Play) -> None:
    assert play.refusal(version=11040, init=999)[0] == CudaFault.DRIVER_TOO_OLD


def test_driver_of_another_minor_version_will_do(play: Play) -> None:
    assert play.probe(version=12020).driver == (12, 2)
    assert play.probe(version=13000).driver == (13, 0)


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        (803, ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "reboot")),
        (804, ("(804)", "update the host's driver")),
        (999, ("CUDA_ERROR_UNKNOWN (999)", "nvidia_uvm", "--gpus all")),
    ],
)
def test_driver_that_does_not_start_is_named_with_its_error(
    play: Play, code: int, texts: tuple[str, ...]
) -> None:
    fault, message = play.refusal(init=code)
    assert fault == CudaFault.DRIVER_FAILED
    for text in ("cuInit", *texts):
        assert text in message


def test_no_gpu(play: Play) -> None:
    fault, message = play.refusal([])
    assert fault == CudaFault.NO_DEVICE
    assert "--gpus all" in message
    assert "CUDA_VISIBLE_DEVICES" not in message


NODE = "/dev/dri/renderD128"


@pytest.mark.parametrize(
    ("machine", "where"),
    [
        (JETSON, "on this Jetson (L4T R35.4.1, JetPack 5) "),
        (Machine(l4t=JETSON.l4t, denied_node=NODE), f"this user may not open {NODE}: on this Jetson (L4T "),
        # a container that does not show the release
        (Machine(denied_node=NODE), f"this user may not open {NODE}: on a Jetson "),
    ],
)
@pytest.mark.parametrize(
    ("init", "fault"),
    [(0, CudaFault.NO_DEVICE), (100, CudaFault.NO_DEVICE), (999, CudaFault.DRIVER_FAILED)],
)
def test_user_who_may_not_use_the_gpu_of_a_jetson_is_told_the_groups(
    play: Play, machine: Machine, where: str, init: int, fault: CudaFault
) -> None:
    found, message = play.refusal([], machine=machine, init=init)
    assert found == fault
    assert where in message
    for text in ("the groups video and render", "--runtime nvidia", "--group-add video", GROUP_OPTION):
        assert text in message


def test_the_group_is_given_as_the_guide_to_containers_gives_it() -> None:
    guide = Path(__file__).resolve().parents[2] / "docs" / "docker.md"
    assert f"`{GROUP_OPTION}`" in guide.read_text()
    assert NODE in GROUP_OPTION


@pytest.mark.parametrize(
    ("nodes", "closed", "denied"),
    [
        (["nvmap", "dri/renderD128"], ["dri/renderD128"], "dri/renderD128"),
        (["nvmap", "dri/renderD128"], ["nvmap", "dri/renderD128"], "dri/renderD128"),
        (["nvmap", "dri/renderD128"], ["nvmap"], "nvmap"),
        (["nvmap", "dri/renderD128"], [], ""),
        # not all of a Jetson's devices were given to the container
        (["nvmap"], [], ""),
        # a desktop, where CUDA does without
        (["dri/renderD128"], ["dri/renderD128"], ""),
    ],
)
def test_device_of_a_jetson_that_the_user_may_not_open_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[str],
    closed: list[str],
    denied: str,
) -> None:
    (tmp_path / "dri").mkdir()
    for node in nodes:
        (tmp_path / node).touch()
    # root may open everything
    refused = {tmp_path / node for node in closed}
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) not in refused)
    machine = Machine.here(tmp_path / "no release", tmp_path)
    assert machine.denied_node == (str(tmp_path / denied) if denied else "")


@pytest.mark.parametrize("visible", ["", "7", "-1"])
def test_hidden_gpu(play: Play, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fault, message = play.refusal(machine=Machine.here())
    assert fault == CudaFault.NO_DEVICE
    assert f"CUDA_VISIBLE_DEVICES is '{visible}'" in message


def test_hidden_gpu_is_not_judged(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert play.probe([RTX_3060, RTX_4090]).devices == (RTX_4090,)


def test_gpu_without_kernels(play: Play) -> None:
    fault, message = play.refusal([RTX_4090, RTX_3060])
    assert fault == CudaFault.NO_KERNEL_IMAGE
    for text in (
        "GPU 1, NVIDIA GeForce RTX 3060",
        "compute capability 8.6",
        "only for 87, 89, 90",
        "CMAKE_CUDA_ARCHITECTURES=86",
    ):
        assert text in message


def test_kernels_that_the_driver_must_compile_need_one_as_new_as_the_toolkit(play: Play) -> None:
    build = CudaBuild(True, (12, 6), ("80-virtual",))
    assert play.probe(build=build, version=12060).devices == (RTX_4090,)
    fault, message = play.refusal(build=build, version=12040)
    assert fault == CudaFault.DRIVER_TOO_OLD
    for text in ("PTX of CUDA 12.6", "CUDA 12.4", "CMAKE_CUDA_ARCHITECTURES=89"):
        assert text in message


def test_driver_says_which_call_failed(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in driver_environment(init=999).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CudaDriverError, match=r"cuInit gives CUDA_ERROR_UNKNOWN \(999\)"):
        CudaDriver(str(driver)).start()


@pytest.mark.parametrize(
    ("text", "jetson"),
    [
        (
            "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic",
            "this Jetson (L4T R36.4.3, JetPack 6)",
        ),
        (
            "# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref",
            "this Jetson (L4T R35.4.1, JetPack 5)",
        ),
        ("# R99 (release), REVISION: 1.0, GCID: 1", "this Jetson (L4T R99.1.0)"),
        ("something else", ""),
    ],
)
def test_jetson_tells_its_release(tmp_path: Path, text: str, jetson: str) -> None:
    release = tmp_path / "nv_tegra_release"
    assert Machine.here(release).jetson_text == ""
    release.write_text(text + "\n")
    assert Machine.here(release).jetson_text == jetson
