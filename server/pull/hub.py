"""The hub, through huggingface_hub: what a repo holds, and the bytes of its files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

import httpx2
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import http_get

# documented there, and not among what the module declares to export
from huggingface_hub.utils import build_hf_headers, disable_progress_bars  # type: ignore[attr-defined]

from s2moe.server.pull.choice import RemoteFile
from s2moe.server.pull.errors import (
    HubUnreachableError,
    NoSuchFileError,
    NoSuchRepoError,
    NotAllowedError,
    PullError,
)

SLICE_BYTES: Final = 16 * 10**9
"""Asked for at once: content delivery networks answer 400 to one request for a file beyond 50 GB."""

_LISTING_SECONDS: Final = 30.0
_SHA256: Final = re.compile("[0-9a-f]{64}")
_NO_SHA256: Final = "0" * 64
_TOO_MANY_REQUESTS: Final = 429


@dataclass(frozen=True)
class Listing:
    """What a repo held at one commit. Its files are read at that commit, whatever is pushed meanwhile."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]


class Hub:
    """The endpoint is HF_ENDPOINT's unless given; the token is HF_TOKEN's, or that of `hf auth login`."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._api = HfApi(endpoint=endpoint, library_name="s2moe")
        self.endpoint: str = self._api.endpoint
        disable_progress_bars()

    def listing(self, repo: str) -> Listing:
        """Raises PullError."""
        with self._explained(repo):
            info = self._api.model_info(repo, files_metadata=True, timeout=_LISTING_SECONDS)
        if info.sha is None:
            raise PullError(f"{self.endpoint} does not say which commit of {repo} it serves; is it a hub?")
        files = tuple(
            RemoteFile(each.rfilename, each.size, None if each.lfs is None else each.lfs.sha256)
            for each in info.siblings or ()
            # a name with control characters has no business on a terminal
            if each.size is not None and each.rfilename.isprintable()
        )
        for file in files:
            # the checksum becomes part of a file's name
            if not isinstance(file.size_bytes, int) or not _SHA256.fullmatch(file.sha256 or _NO_SHA256):
                raise PullError(
                    f"{self.endpoint} gives no proper size and sha256 of {file.path}; is it a hub?"
                )
        return Listing(repo, info.sha, files)

    def read(self, listing: Listing, file: RemoteFile, out: BinaryIO, have_bytes: int) -> None:
        """Appends to `out`, which holds the first `have_bytes` of the file, the next slice of it.

        A lost connection is taken up again a few times. Where the hub ignores ranges, `out` is begun anew.
        Raises PullError, and OSError of `out`.
        """
        end = min(have_bytes + SLICE_BYTES, file.size_bytes)
        url = hf_hub_url(listing.repo, file.path, revision=listing.commit, endpoint=self.endpoint)
        with self._explained(listing.repo, file):
            # Not hf_hub_download: from 1.18 on it throws away what it has when it is interrupted.
            http_get(
                url,
                out,
                resume_size=have_bytes,
                headers={**build_hf_headers(library_name="s2moe"), "Range": f"bytes=0-{end - 1}"},
                expected_size=end,
                displayed_filename=file.name,
            )

    @contextlib.contextmanager
    def _explained(self, repo: str, file: RemoteFile | None = None) -> Iterator[None]:
        """Turns what huggingface_hub raises into PullError, of the most exact kind first."""
        try:
            yield
        except GatedRepoError as error:
            raise NotAllowedError(
                f"{repo} is gated: accept its terms on {self.endpoint}/{repo}, and set HF_TOKEN to a token "
                "of that account"
            ) from error
        except RepositoryNotFoundError as error:
            raise NoSuchRepoError(
                f"{self.endpoint} has no repo {repo}, or it is private: check the name, or set HF_TOKEN to a "
                "token that may read it"
            ) from error
        except RemoteEntryNotFoundError as error:
            name = repo if file is None else f"{file.path} of {repo}"
            raise NoSuchFileError(f"{self.endpoint} has no {name} any more; run the command again") from error
        except HfHubHTTPError as error:
            raise self._explain_status(error.response.status_code, repo) from error
        except OfflineModeIsEnabled as error:
            raise HubUnreachableError(
                "HF_HUB_OFFLINE forbids the network: unset it, or copy the GGUF file here by hand"
            ) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            cause = " ".join(str(error).split()) or type(error).__name__
            raise HubUnreachableError(
                f"cannot reach {self.endpoint} ({cause}): check network, proxy and HF_ENDPOINT, then run the "
                "same command again; it goes on where it stopped"
            ) from error
        except OSError as error:
            if error.errno is not None:
                raise  # of the disk
            raise HubUnreachableError(
                f"{self.endpoint} sends more or less than it was asked for: run the same command again, "
                "without proxy or mirror (HF_ENDPOINT) if it happens twice"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise PullError(
                f"{self.endpoint} does not answer as a hub does ({type(error).__name__}): check HF_ENDPOINT"
            ) from error

    def _explain_status(self, status: int, repo: str) -> PullError:
        if status in (401, 403):
            return NotAllowedError(
                f"{self.endpoint} refuses access to {repo} (status {status}): set HF_TOKEN to a valid token "
                "that may read it, or unset it for a public repo"
            )
        if status == _TOO_MANY_REQUESTS or status >= 500:
            return HubUnreachableError(
                f"{self.endpoint} is down or busy (status {status}): run the same command again later; it "
                "goes on where it stopped"
            )
        return PullError(
            f"{self.endpoint} answers status {status} for {repo}: check HF_ENDPOINT; "
            f"`hf download {repo}` may have another way"
        )
