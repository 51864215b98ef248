"""What the hub may answer, and how the command says it: one line, the remedy, the exit code."""

from __future__ import annotations

import builtins
import json
import socket
from pathlib import Path

import pytest
from fake_hub import REPO, FakeHub, Refusal
from pull_rig import failure_of, start_pull

from s2moe.server.pull import command
from s2moe.server.pull.download import pull
from s2moe.server.pull.errors import PullError
from s2moe.server.pull.hub import Hub
from s2moe.server.pull.progress import progress_on

UNKNOWN = Refusal(401, "RepoNotFound", "Repository not found")
GATED = Refusal(403, "GatedRepo", f"Access to model {REPO} is restricted.")
BAD_TOKEN = Refusal(401, "", "Invalid credentials in Authorization header")


@pytest.mark.parametrize(
    ("refusal", "exit_code", "words"),
    [
        (UNKNOWN, 4, [REPO, "private", "HF_TOKEN"]),
        (Refusal(404, "RepoNotFound", "Repository not found"), 4, [REPO, "HF_TOKEN"]),
        (GATED, 6, ["gated", "terms", "HF_TOKEN"]),
        (BAD_TOKEN, 6, ["401", "HF_TOKEN"]),
        (Refusal(403), 6, ["403", "HF_TOKEN"]),
        (Refusal(500), 3, ["500", "again later"]),
        (Refusal(418), 1, ["418", "HF_ENDPOINT"]),
    ],
)
def test_refused_listing(
    hub: FakeHub, tmp_path: Path, refusal: Refusal, exit_code: int, words: list[str]
) -> None:
    hub.refuse_listing = refusal
    error = failure_of(hub, tmp_path)
    assert error.exit_code == exit_code
    assert hub.url in str(error)
    assert [word for word in words if word not in str(error)] == []


@pytest.mark.parametrize(
    ("refusal", "exit_code"),
    [(GATED, 6), (BAD_TOKEN, 6), (Refusal(404, "EntryNotFound", "Entry not found"), 5), (Refusal(503), 3)],
)
def test_refused_file(hub: FakeHub, tmp_path: Path, refusal: Refusal, exit_code: int) -> None:
    """A gated repo shows its listing to everybody."""
    hub.refuse_file = refusal
    assert failure_of(hub, tmp_path).exit_code == exit_code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "listing",
    [
        *(
            b"<html>Welcome</html>",
            b"{}",
            b"[]",
            b'{"id": "a/b"}',
            b'{"id": "a/b", "sha": 5, "siblings": []}',
        ),
        b'{"id": "a/b", "sha": "1", "siblings": [{"rfilename": 7, "size": 1}]}',
        b'{"id": "a/b", "sha": "1", "siblings": [{"rfilename": "m.gguf", "size": -5}]}',
        b"[" * 200_000,
    ],
    ids=range(8),
)
def test_endpoint_that_is_no_hub_is_said(hub: FakeHub, tmp_path: Path, listing: bytes) -> None:
    hub.listing = listing
    error = failure_of(hub, tmp_path)
    assert error.exit_code == 1
    assert hub.url in str(error)


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "ftp://127.0.0.1:{port}"])
def test_unreachable_hub_is_said_with_its_address(tmp_path: Path, url: str) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        url = url.format(port=taken.getsockname()[1])
        with pytest.raises(PullError) as caught:
            pull(Hub(url), REPO, None, tmp_path, progress_on())
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    assert url in str(caught.value)
    assert "HF_ENDPOINT" in str(caught.value)


@pytest.mark.parametrize("variable", ["HF_TOKEN_PATH", "SSL_CERT_FILE"])
def test_what_cannot_be_read_before_the_hub_is_asked_is_said(
    hub: FakeHub, tmp_path: Path, variable: str
) -> None:
    # a folder in place of a token, no file in place of certificates
    value = {"HF_TOKEN_PATH": str(tmp_path), "SSL_CERT_FILE": "/nonexistent"}[variable]
    process = start_pull(hub.url, REPO, "--dir", str(tmp_path), **{variable: value})
    out, error = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert error.count("\n") == 1
    assert variable in error
    assert hub.seen == []


@pytest.mark.parametrize(
    ("variable", "value", "code"),
    [("HF_HUB_DOWNLOAD_TIMEOUT", "abc", 1), ("HF_TOKEN", "tökén", 6)],
)
def test_variable_that_cannot_be_used_is_said(
    hub: FakeHub, tmp_path: Path, variable: str, value: str, code: int
) -> None:
    process = start_pull(hub.url, REPO, "--dir", str(tmp_path), **{variable: value})
    _, error = process.communicate(timeout=120)
    assert process.returncode == code
    assert "Traceback" not in error
    assert variable in error or "HF_…" in error.splitlines()[-1]
    assert hub.seen == []


def test_interrupt_before_anything_is_asked(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its packages are imported, which takes a second."""

    def interrupted(name: str, *rest: object) -> object:
        if name == "s2moe.server.pull.hub":
            raise KeyboardInterrupt
        return real(name, *rest)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(PullError) as caught:
        command.run({"model": (REPO, None), "dir": None})
    assert caught.value.exit_code == 130


@pytest.mark.parametrize("repo", ["acme/moe--GGUF", "acme/moe.", "acme/" + "m" * 100])
def test_name_that_no_hub_knows_is_no_repo(hub: FakeHub, tmp_path: Path, repo: str) -> None:
    with pytest.raises(PullError) as caught:
        pull(Hub(hub.url), repo, None, tmp_path, progress_on())
    assert caught.value.exit_code == 4
    assert repo in str(caught.value)
    assert hub.seen == []


def test_offline_mode_is_said(hub: FakeHub, tmp_path: Path) -> None:
    process = start_pull(hub.url, REPO, "--dir", str(tmp_path), HF_HUB_OFFLINE="1")
    out, error = process.communicate(timeout=120)
    assert (process.returncode, out) == (3, "")
    assert error.count("\n") == 1
    assert "HF_HUB_OFFLINE" in error
    assert hub.seen == []


@pytest.mark.parametrize("sha256", ["../../../../etc/passwd", "ABC", "\x1b[2J"])
def test_checksum_that_is_none_is_no_part_of_a_path(hub: FakeHub, tmp_path: Path, sha256: str) -> None:
    listing = json.loads(hub._listing())
    for sibling in listing["siblings"]:
        if "lfs" in sibling:
            sibling["lfs"]["sha256"] = sha256
    hub.listing = json.dumps(listing).encode()
    error = failure_of(hub, tmp_path)
    assert "no proper size and sha256" in str(error)
    assert list(tmp_path.iterdir()) == []
