"""What lies on the disk after a download, whole, cut or damaged."""

from __future__ import annotations

import fcntl
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import pytest
from fake_hub import CHUNK_BYTES, COMMIT, MODEL, REPO, FakeHub, content_of
from pull_rig import Said, failure_of, part_of_model, parts_in, pulled, start_pull

from s2moe.server.pull import hub as hub_module
from s2moe.server.pull.errors import ChecksumError, DiskFullError, HubUnreachableError, PullError

from waiting import until

BIG = 2 * CHUNK_BYTES + 1_000_000
"""Written in three steps, so that a cut can lie between two of them."""


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


def test_lost_connection_is_taken_up_again_where_it_broke(hub: FakeHub, tmp_path: Path, big: bytes) -> None:
    hub.cuts = [CHUNK_BYTES + 5]
    assert pulled(hub, tmp_path).read_bytes() == big
    assert hub.ranges == [f"bytes=0-{BIG - 1}", f"bytes={CHUNK_BYTES}-{BIG - 1}"]


def test_killed_pull_goes_on_where_it_was(hub: FakeHub, tmp_path: Path, big: bytes) -> None:
    hub.stall_after_bytes = CHUNK_BYTES + 5
    process = start_pull(hub.url, REPO, "--dir", str(tmp_path))
    until(lambda: any(part.stat().st_size == CHUNK_BYTES for part in parts_in(tmp_path)))
    process.kill()
    process.communicate()
    assert not (tmp_path / MODEL).exists()

    hub.stall_after_bytes = None
    said = Said()
    assert pulled(hub, tmp_path, said=said).read_bytes() == big
    assert hub.ranges[1:] == [f"bytes={CHUNK_BYTES}-{BIG - 1}"]
    assert said.lines[0] == f"resuming {MODEL} at {100 * CHUNK_BYTES // BIG} %"
    assert said.steps[0] == CHUNK_BYTES
    assert parts_in(tmp_path) == []


def test_interrupt_keeps_what_was_received_and_says_so(hub: FakeHub, tmp_path: Path, big: bytes) -> None:
    # a shell may have started these tests with SIGINT ignored, which the command would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hub.stall_after_bytes = CHUNK_BYTES + 5
    process = start_pull(hub.url, REPO, "--dir", str(tmp_path))
    until(lambda: any(part.stat().st_size == CHUNK_BYTES for part in parts_in(tmp_path)))
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out == ""
    last = error.splitlines()[-1]
    assert last.startswith("s2moe: error: interrupted at ")
    assert "goes on from there" in last
    assert str(parts_in(tmp_path)[0]) in last
    assert "Traceback" not in error


def test_hub_that_ignores_ranges_gives_the_file_all_the_same(
    hub: FakeHub, tmp_path: Path, big: bytes
) -> None:
    hub.cuts = [CHUNK_BYTES + 5]
    hub.ignores_ranges = True
    assert pulled(hub, tmp_path).read_bytes() == big


def test_large_file_is_asked_for_in_slices(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "SLICE_BYTES", 90_000)
    assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]
    assert hub.ranges == ["bytes=0-89999", "bytes=90000-179999", "bytes=180000-199999"]


def test_large_file_of_a_hub_that_ignores_ranges_is_refused(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "SLICE_BYTES", 90_000)
    hub.ignores_ranges = True
    error = failure_of(hub, tmp_path)
    assert error.exit_code == 3
    assert "more or less" in str(error)


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
    part_of_model(hub, tmp_path).write_bytes(big[:CHUNK_BYTES])
    hub.files[MODEL] = content_of(BIG, seed=1)
    assert pulled(hub, tmp_path).read_bytes() == hub.files[MODEL]
    assert hub.ranges == [f"bytes=0-{BIG - 1}"]


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


def test_disk_that_fills_up_meanwhile_is_said_with_the_remedy(hub: FakeHub, tmp_path: Path) -> None:
    part_of_model(hub, tmp_path).symlink_to("/dev/full")  # the kernel's own ENOSPC, at the first byte
    error = failure_of(hub, tmp_path)
    assert isinstance(error, DiskFullError)
    assert error.exit_code == 7
    assert "no space left" in str(error)
    assert "goes on where it stopped" in str(error)


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


def test_connection_that_stays_lost_ends_in_one_line(
    hub: FakeHub, tmp_path: Path, big: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.cuts = [CHUNK_BYTES + 5] * 9
    error = failure_of(hub, tmp_path)
    assert isinstance(error, HubUnreachableError)
    assert error.exit_code == 3
    assert "same command again" in str(error)
    assert [part.stat().st_size for part in parts_in(tmp_path)] == [CHUNK_BYTES]


def test_file_that_appears_meanwhile_is_not_replaced(hub: FakeHub, tmp_path: Path) -> None:
    class Somebody(Said):
        def say(self, line: str) -> None:
            if line.startswith("checking"):
                (tmp_path / MODEL).write_bytes(b"mine")

    with pytest.raises(PullError, match="has appeared meanwhile"):
        pulled(hub, tmp_path, said=Somebody())
    assert (tmp_path / MODEL).read_bytes() == b"mine"
    assert parts_in(tmp_path) != []
