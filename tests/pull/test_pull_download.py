"""What lies on the disk after a download, whole, cut or damaged."""

from __future__ import annotations

import errno
import fcntl
import inspect
import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_hub import COMMIT, MODEL, REPO, FakeHub, content_of
from pull_rig import Said, failure_of, part_of_model, parts_in, pulled, start_pull

from s2moe.server.pull import download as download_module
from s2moe.server.pull import hub as hub_module
from s2moe.server.pull.errors import ChecksumError, DiskFullError, HubUnreachableError, PullError

from waiting import until

BIG = 3_000_000
"""Comes in many pieces."""
CUT = 1_000_005
TRANSPORT_ERRORS = [
    httpx2.ConnectTimeout,
    httpx2.ReadTimeout,
    httpx2.WriteTimeout,
    httpx2.PoolTimeout,
    httpx2.ConnectError,
    httpx2.ReadError,
    httpx2.WriteError,
    httpx2.CloseError,
    httpx2.RemoteProtocolError,
    httpx2.ProxyError,
]


@pytest.fixture
def big(hub: FakeHub) -> bytes:
    hub.files[MODEL] = content_of(BIG)
    return hub.files[MODEL]


def test_file_arrives_under_its_name_and_nothing_else_does(hub: FakeHub, tmp_path: Path) -> None:
    directory = tmp_path / "new" / "folder"
    said = Said()
    path = pulled(hub, directory, "Q4_K_M", said)
    assert path == directory / MODEL
    assert path.read_bytes() == hub.files[MODEL]
    assert list(directory.iterdir()) == [path]
    assert (said.steps[0], said.steps[-1]) == (0, 200_000)
    assert any("sha256" in line for line in said.lines)


def test_file_is_read_at_the_commit_that_was_listed(hub: FakeHub, tmp_path: Path) -> None:
    pulled(hub, tmp_path)
    assert [each.path for each in hub.seen if each.host == "hub"] == [
        f"/api/models/{REPO}",
        f"/{REPO}/resolve/{COMMIT}/{MODEL}",
    ]


def test_token_goes_to_the_hub_and_nowhere_else(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pulled(hub, tmp_path)
    assert {each.token for each in hub.seen if each.host == "hub"} == {"Bearer hf_secret"}
    assert {each.token for each in hub.seen if each.host == "cdn"} == {None}


def ranges_from(*first: int) -> list[str]:
    """What is asked for to have all of `big` from there on."""
    return [f"bytes={each}-{BIG - 1}" for each in first]


def causes(said: Said) -> list[str]:
    """Why something was tried again."""
    return [line for line in said.lines if "trying again" in line]


@pytest.mark.parametrize(
    ("resets", "cause"),
    [(False, "peer closed connection"), (True, "Connection reset by peer")],
    ids=["closed", "reset"],
)
def test_lost_connection_is_taken_up_again_where_it_broke(
    hub: FakeHub, tmp_path: Path, big: bytes, resets: bool, cause: str
) -> None:
    hub.resets = resets
    hub.cuts = [CUT, CUT + 7]
    said = Said()
    assert pulled(hub, tmp_path, said=said).read_bytes() == big
    assert hub.ranges == ranges_from(0, CUT, CUT + 7)
    assert [cause in line for line in causes(said)] == [True, True]
    # new bytes have come in between
    assert all(line.startswith(f"{MODEL} at 33 %: ") and "in 0.01 s" in line for line in causes(said))


def test_silent_connection_is_taken_up_again_where_it_broke(
    hub: FakeHub, tmp_path: Path, big: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mender(Said):
        def say(self, line: str) -> None:
            super().say(line)
            if "trying again" in line:
                hub.stall_after_bytes = None

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 2)
    hub.stall_after_bytes = CUT
    said = Mender()
    assert pulled(hub, tmp_path, said=said).read_bytes() == big
    assert hub.ranges[:2] == ranges_from(0, CUT)
    assert "timed out" in causes(said)[0]


def test_host_that_is_gone_for_a_moment_is_asked_again(hub: FakeHub, tmp_path: Path, big: bytes) -> None:
    hub.cuts = [CUT]
    hub.refused = 2
    said = Said()
    assert pulled(hub, tmp_path, said=said).read_bytes() == big
    assert hub.ranges == ranges_from(0, CUT)
    assert ["refused" in line for line in causes(said)] == [True, True, False]


def test_host_that_is_busy_for_a_moment_is_asked_again(hub: FakeHub, tmp_path: Path, big: bytes) -> None:
    hub.failures = [502, 503]
    said = Said()
    assert pulled(hub, tmp_path, said=said).read_bytes() == big
    assert ["status 502" in causes(said)[0], "status 503" in causes(said)[1]] == [True, True]


def test_busy_hub_is_asked_again_when_it_says(hub: FakeHub, tmp_path: Path, big: bytes) -> None:
    hub.failures = [429, 408]
    hub.retry_after = "1"
    said = Said()
    assert pulled(hub, tmp_path, said=said).read_bytes() == big
    assert [line.rsplit("status ", 1)[1] for line in causes(said)] == [
        "429; trying again in 1 s",
        "408; trying again in 1 s",
    ]


def test_hub_that_is_busy_for_long_is_not_waited_for(hub: FakeHub, tmp_path: Path) -> None:
    hub.failures = [429] * 9
    hub.retry_after = "1000000"
    error = failure_of(hub, tmp_path)
    assert error.exit_code == 3
    assert "status 429" in str(error)
    assert len(hub.ranges) == 1


@pytest.mark.parametrize("have", [0, CUT])
def test_page_of_a_portal_is_not_mixed_with_the_file(
    hub: FakeHub, tmp_path: Path, big: bytes, have: int
) -> None:
    part_of_model(hub, tmp_path).write_bytes(big[:have])
    hub.page = b"<html>please log in</html>" * (1 + have // 10)
    error = failure_of(hub, tmp_path)
    assert "more or less than it was asked for" in str(error)
    assert [part.stat().st_size for part in parts_in(tmp_path)] == [have] * (have > 0)
    hub.page = b""
    assert pulled(hub, tmp_path).read_bytes() == big


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_of_ours_is_not_written_to(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    part = part_of_model(hub, tmp_path)
    if kind == "link":
        part.symlink_to(victim)
    else:
        os.mkfifo(part)
    error = failure_of(hub, tmp_path)
    assert f"{part} is not a regular file" in str(error)
    assert victim.read_bytes() == b"precious"
    assert hub.ranges == []


def test_dangling_link_of_the_files_name_is_seen_before_the_download(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / MODEL).symlink_to(tmp_path / "nowhere")
    assert "move it away" in str(failure_of(hub, tmp_path))
    assert hub.ranges == []


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *((each, True) for each in TRANSPORT_ERRORS),
        *((each, False) for each in (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)),
        (httpx2.DecodingError, False),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_every_kind_of_lost_connection_is_taken_up_again(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[httpx2.RequestError],
    passes: bool,
) -> None:
    """Also those that are hard to bring about."""
    real, n_calls = httpx2.Client.stream, 0

    def stream(client: httpx2.Client, method: str, url: str, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            raise error("it is lost")
        return real(client, method, url, **options)

    monkeypatch.setattr(httpx2.Client, "stream", stream)
    if passes:
        assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]
    else:
        assert "it is lost" in str(failure_of(hub, tmp_path))
    assert n_calls == 1 + passes


def test_connection_that_is_lost_a_hundred_times_gets_there(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number of losses is too large, as long as there is something new each time."""
    monkeypatch.setattr(download_module, "RETRY_WAITS_SECONDS", (0.0,))
    hub.cuts = list(range(1000, 101_000, 1000))
    depths: list[int] = []

    class Deep(Said):
        def at(self, done_bytes: int) -> None:
            depths.append(len(inspect.stack(0)))

    assert pulled(hub, tmp_path, said=Deep()).read_bytes() == hub.files[MODEL]
    assert len(hub.ranges) == 101
    assert max(depths) == min(depths)


def test_waits_grow_and_end(hub: FakeHub, tmp_path: Path, big: bytes) -> None:
    hub.resets = True
    hub.cuts = [CUT] * 9
    said = Said()
    with pytest.raises(HubUnreachableError, match="same command again") as caught:
        pulled(hub, tmp_path, said=said)
    assert "Connection reset by peer" in str(caught.value)
    waits = [line.rsplit(" in ", 1)[1] for line in causes(said)]
    assert waits == ["0.01 s", "0.02 s", "0.04 s", "0.08 s", "0.16 s"]
    assert hub.ranges == ranges_from(0, *[CUT] * 5)
    assert [part.stat().st_size for part in parts_in(tmp_path)] == [CUT]
    hub.cuts = []
    assert pulled(hub, tmp_path).read_bytes() == big


def test_killed_pull_goes_on_where_it_was(hub: FakeHub, tmp_path: Path, big: bytes) -> None:
    hub.stall_after_bytes = CUT
    process = start_pull(hub.url, REPO, "--dir", str(tmp_path))
    until(lambda: any(part.stat().st_size == CUT for part in parts_in(tmp_path)))
    process.kill()
    process.communicate()
    assert not (tmp_path / MODEL).exists()

    hub.stall_after_bytes = None
    said = Said()
    assert pulled(hub, tmp_path, said=said).read_bytes() == big
    assert hub.ranges[1:] == ranges_from(CUT)
    assert said.lines[0] == f"resuming {MODEL} at {100 * CUT // BIG} %"
    assert said.steps[0] == CUT
    assert parts_in(tmp_path) == []


def test_interrupt_keeps_what_was_received_and_says_so(hub: FakeHub, tmp_path: Path, big: bytes) -> None:
    # a shell may have started these tests with SIGINT ignored, which the command would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hub.stall_after_bytes = CUT
    process = start_pull(hub.url, REPO, "--dir", str(tmp_path))
    until(lambda: any(part.stat().st_size == CUT for part in parts_in(tmp_path)))
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out == ""
    last = error.splitlines()[-1]
    assert last.startswith("s2moe: error: interrupted at ")
    assert "goes on from there" in last
    assert str(parts_in(tmp_path)[0]) in last
    assert "Traceback" not in error


def test_interrupt_while_it_waits_keeps_what_was_received(
    hub: FakeHub, tmp_path: Path, big: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    hub.cuts = [CUT]
    with monkeypatch.context() as patch:
        patch.setattr(download_module.time, "sleep", interrupt)
        error = failure_of(hub, tmp_path)
    assert error.exit_code == 130
    assert "interrupted at 33 %" in str(error)
    assert pulled(hub, tmp_path).read_bytes() == big
    assert hub.ranges == ranges_from(0, CUT)


def test_hub_that_ignores_ranges_gives_the_file_all_the_same(
    hub: FakeHub, tmp_path: Path, big: bytes
) -> None:
    hub.cuts = [CUT, CUT + 1000, 700]
    hub.ignores_ranges = True
    said = Said()
    assert pulled(hub, tmp_path, said=said).read_bytes() == big
    # what is there stays, even where less comes at the next time
    assert said.steps == sorted(said.steps)
    assert hub.ranges == ranges_from(0, CUT, CUT + 1000, CUT + 1000)


def test_large_file_is_asked_for_in_slices(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "SLICE_BYTES", 90_000)
    assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]
    assert hub.ranges == ["bytes=0-89999", "bytes=90000-179999", "bytes=180000-199999"]


def test_large_file_of_a_hub_that_ignores_ranges_comes_at_once(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "SLICE_BYTES", 90_000)
    hub.ignores_ranges = True
    assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]
    assert hub.ranges == ["bytes=0-89999"]


def test_range_that_comes_in_part_is_asked_for_further(hub: FakeHub, tmp_path: Path) -> None:
    hub.part_bytes = 80_000
    assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]
    assert hub.ranges == [f"bytes={first}-199999" for first in (0, 80_000, 160_000)]


@pytest.mark.parametrize("ignores_ranges", [False, True])
@pytest.mark.parametrize("size", [100, 150_000, 199_999, 200_001])
@pytest.mark.parametrize("have", [0, 150_000])
def test_file_of_another_size_than_the_listed_one_is_not_mixed_with_what_is_there(
    hub: FakeHub, tmp_path: Path, have: int, size: int, ignores_ranges: bool
) -> None:
    hub.on_cdn = content_of(size, seed=1)
    hub.ignores_ranges = ignores_ranges
    part = part_of_model(hub, tmp_path)
    if have:
        part.write_bytes(hub.files[MODEL][:have])
    error = failure_of(hub, tmp_path)
    assert error.exit_code == 3
    assert "more or less" in str(error)
    assert [each.read_bytes() for each in parts_in(tmp_path)] == [hub.files[MODEL][:have]] * bool(have)
    hub.on_cdn = None
    assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]


def test_bytes_from_elsewhere_in_the_file_are_not_taken(hub: FakeHub, tmp_path: Path, big: bytes) -> None:
    hub.cuts = [CUT]

    class Misleader(Said):
        def say(self, line: str) -> None:
            if "trying again" in line:
                hub.shift_bytes = 1

    with pytest.raises(HubUnreachableError, match="more or less"):
        pulled(hub, tmp_path, said=Misleader())
    assert [part.read_bytes() for part in parts_in(tmp_path)] == [big[:CUT]]


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_answer_that_does_not_end_is_not_kept(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores_ranges: bool
) -> None:
    """Chunked, and so without a length that gives it away."""
    monkeypatch.setattr(hub_module, "SLICE_BYTES", 90_000)
    hub.ignores_ranges = ignores_ranges
    hub.goes_on_for_bytes = 1_000_000
    error = failure_of(hub, tmp_path)
    assert error.exit_code == 3
    assert "more or less" in str(error)
    assert sum(part.stat().st_size for part in parts_in(tmp_path)) <= 200_000


def test_part_that_is_whole_is_not_asked_for_again(hub: FakeHub, tmp_path: Path) -> None:
    part_of_model(hub, tmp_path).write_bytes(hub.files[MODEL])
    assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]
    assert hub.ranges == []
    assert parts_in(tmp_path) == []


def test_part_that_is_too_long_begins_anew(hub: FakeHub, tmp_path: Path) -> None:
    part_of_model(hub, tmp_path).write_bytes(hub.files[MODEL] + b"x")
    assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]


@pytest.mark.parametrize("have", [150_000, 200_000])
def test_part_that_is_damaged_is_removed_in_the_end(hub: FakeHub, tmp_path: Path, have: int) -> None:
    """As a power failure may leave one."""
    part_of_model(hub, tmp_path).write_bytes(bytes(have))
    assert isinstance(failure_of(hub, tmp_path), ChecksumError)
    assert list(tmp_path.iterdir()) == []
    assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]


def test_damaged_file_is_removed_with_a_message(hub: FakeHub, tmp_path: Path) -> None:
    hub.damaged = True
    error = failure_of(hub, tmp_path)
    assert isinstance(error, ChecksumError)
    assert error.exit_code == 8
    assert MODEL in str(error)
    assert "sha256" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_new_version_does_not_grow_from_bytes_of_the_old_one(
    hub: FakeHub, tmp_path: Path, big: bytes
) -> None:
    part_of_model(hub, tmp_path).write_bytes(big[:CUT])
    hub.files[MODEL] = content_of(BIG, seed=1)
    assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]
    assert hub.ranges == ranges_from(0)


def test_file_that_the_hub_has_no_checksum_of_is_said_to_be_unchecked(hub: FakeHub, tmp_path: Path) -> None:
    hub.in_git = frozenset({MODEL})
    said = Said()
    assert pulled(hub, tmp_path, said=said).read_bytes() == hub.files[MODEL]
    assert "only its size was checked" in said.lines[-1]


def test_split_model_comes_with_all_parts(hub: FakeHub, tmp_path: Path) -> None:
    names = [f"moe-Q8_0-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    hub.files = {f"Q8_0/{name}": content_of(1000 + seed, seed) for seed, name in enumerate(names)}
    assert pulled(hub, tmp_path, "Q8_0") == tmp_path / names[0]
    assert [(tmp_path / name).read_bytes() for name in names] == list(hub.files.values())


def test_file_that_is_there_is_checked_and_not_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / MODEL).write_bytes(hub.files[MODEL])
    assert pulled(hub, tmp_path) == tmp_path / MODEL
    assert hub.ranges == []


@pytest.mark.parametrize("content", [b"mine", content_of(200_000, seed=1)])
def test_another_file_of_that_name_is_left_alone(hub: FakeHub, tmp_path: Path, content: bytes) -> None:
    (tmp_path / MODEL).write_bytes(content)
    error = failure_of(hub, tmp_path)
    assert str(tmp_path / MODEL) in str(error)
    assert "--dir" in str(error)
    assert (tmp_path / MODEL).read_bytes() == content


def test_disk_that_is_too_small_is_said_before_the_download(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 199_999, 199_999))
    error = failure_of(hub, tmp_path)
    assert isinstance(error, DiskFullError)
    assert error.exit_code == 7
    assert str(tmp_path) in str(error)
    assert "200.0 kB" in str(error)
    assert hub.ranges == []


def test_space_that_a_part_takes_already_is_not_asked_for_again(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_of_model(hub, tmp_path).write_bytes(hub.files[MODEL][:150_000])
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 50_000, 50_000))
    assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]


def test_disk_that_fills_up_meanwhile_is_said_with_the_remedy(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the kernel's own ENOSPC, at the first byte
    monkeypatch.setattr(download_module, "_open_regular", lambda *_: os.open("/dev/full", os.O_WRONLY))
    error = failure_of(hub, tmp_path)
    assert isinstance(error, DiskFullError)
    assert error.exit_code == 7
    assert "no space left" in str(error)
    assert "goes on where it stopped" in str(error)


def test_disk_that_fills_up_keeps_what_there_was_room_for(
    hub: FakeHub, tmp_path: Path, big: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(download_module._PartFile):
        def write(self, data: Any) -> int:
            room = CUT - self.tell()
            if len(data) <= room:
                return super().write(data)
            super().write(data[:room])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(download_module, "_PartFile", Small)
        assert isinstance(failure_of(hub, tmp_path), DiskFullError)
    assert hub.ranges == ranges_from(0)
    assert [part.stat().st_size for part in parts_in(tmp_path)] == [CUT]
    assert pulled(hub, tmp_path).read_bytes() == big
    assert hub.ranges[1:] == ranges_from(CUT)


def test_folder_that_cannot_be_written_is_named(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = failure_of(hub, tmp_path / "file" / "models")
    assert error.exit_code == 1
    assert str(tmp_path / "file" / "models") in str(error)
    assert "--dir" in str(error)


def test_second_pull_of_the_same_file_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    with part_of_model(hub, tmp_path).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        error = failure_of(hub, tmp_path)
    assert error.exit_code == 1
    assert "another s2moe pull" in str(error)
    assert pulled(hub, tmp_path).exists()


def test_file_that_appears_meanwhile_is_not_replaced(hub: FakeHub, tmp_path: Path) -> None:
    class Somebody(Said):
        def say(self, line: str) -> None:
            if line.startswith("checking"):
                (tmp_path / MODEL).write_bytes(b"mine")

    with pytest.raises(PullError, match="has appeared meanwhile"):
        pulled(hub, tmp_path, said=Somebody())
    assert (tmp_path / MODEL).read_bytes() == b"mine"
    assert parts_in(tmp_path) != []
