"""What can end `s2moe pull`, each with its exit code. The message is one line with the remedy."""

from __future__ import annotations

from typing import ClassVar


class PullError(Exception):
    """The model could not be had; anything that has no code of its own."""

    exit_code: ClassVar[int] = 1


class HubUnreachableError(PullError):
    """No network, a wrong HF_ENDPOINT, or a hub that is down or busy."""

    exit_code = 3

    def __init__(self, message: str, *, passing_cause: str = "", wait_seconds: float = 0.0) -> None:
        """`passing_cause`: in a few words, what may have passed at another try, after `wait_seconds` at the
        soonest; empty = it will not."""
        super().__init__(message)
        self.passing_cause = passing_cause
        self.wait_seconds = wait_seconds


class NoSuchRepoError(PullError):
    """The repo does not exist, or is private; the hub does not tell which."""

    exit_code = 4


class NoSuchFileError(PullError):
    """The repo has no such model, or more than one that fits."""

    exit_code = 5


class NotAllowedError(PullError):
    """The repo is gated, or the hub refuses the token."""

    exit_code = 6


class DiskFullError(PullError):
    exit_code = 7


class ChecksumError(PullError):
    """The bytes on the disk are not the hub's."""

    exit_code = 8


class InterruptedPullError(PullError):
    exit_code = 130
