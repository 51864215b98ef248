"""The hub, through huggingface_hub: what a repo holds, and the bytes of its files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

# documented there, and not among what the module declares to export
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    disable_progress_bars,
    hf_raise_for_status,
    http_stream_backoff,
)

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
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]+)-[0-9]+/([0-9]+|\*)")

_RANGE_NOT_SATISFIABLE: Final = 416
_BUSY_STATUSES: Final = (408, 429)
_CAUSE_LENGTH: Final = 200
_PASSING_ERRORS: Final = (
    httpx2.TimeoutException,
    httpx2.NetworkError,
    httpx2.RemoteProtocolError,
    httpx2.ProxyError,
)
"""What a line, a proxy or a host that fails for a moment can bring about. The rest of httpx2's transport
errors are a wrong address and a wrong use of HTTP."""


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
            files = tuple(
                RemoteFile(each.rfilename, each.size, None if each.lfs is None else each.lfs.sha256)
                for each in info.siblings or ()
                # a name with control characters has no business on a terminal
                if each.size is not None and each.rfilename.isprintable()
            )
        if not isinstance(info.sha, str):
            raise PullError(f"{self.endpoint} does not say which commit of {repo} it serves; is it a hub?")
        for file in files:
            # the checksum becomes part of a file's name
            is_size = isinstance(file.size_bytes, int) and file.size_bytes >= 0
            if not is_size or not _SHA256.fullmatch(file.sha256 or _NO_SHA256):
                raise PullError(
                    f"{self.endpoint} gives no proper size and sha256 of {file.path}; is it a hub?"
                )
        return Listing(repo, info.sha, files)

    def read(self, listing: Listing, file: RemoteFile, out: BinaryIO, have_bytes: int) -> None:
        """Appends to `out`, which holds the first `have_bytes` of the file, what one request for the next
        slice brings: all of it or less.

        Where the hub ignores ranges, what `out` has already is passed over. Raises PullError, and OSError of
        `out`.
        """
        end = min(have_bytes + SLICE_BYTES, file.size_bytes)
        url = hf_hub_url(listing.repo, file.path, revision=listing.commit, endpoint=self.endpoint)
        headers = build_hf_headers(library_name="s2moe")
        headers |= {"Range": f"bytes={have_bytes}-{end - 1}", "Accept-Encoding": "identity"}
        # Not hf_hub_download: from 1.18 on it throws away what it has when it is interrupted. Nor http_get:
        # it takes up some kinds of lost connections only, one call deeper each time, and keeps whole 10 MB.
        with (
            self._explained(listing.repo, file),
            http_stream_backoff(
                "GET",
                url,
                headers=headers,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                retry_on_exceptions=(),
                retry_on_status_codes=(),
            ) as response,
        ):
            if response.status_code in _BUSY_STATUSES:
                raise self._busy(response.status_code, _retry_after_seconds(response))
            hf_raise_for_status(response)
            if not _is_of(response, file, have_bytes):
                raise self._other_bytes()
            n_known = 0
            if response.status_code == httpx2.codes.OK:
                n_known, end = have_bytes, file.size_bytes
            at = have_bytes
            for chunk in response.iter_bytes():
                new = chunk[n_known:]
                n_known -= len(chunk) - len(new)
                at += len(new)
                if at > end:
                    raise self._other_bytes()
                out.write(new)
            if response.status_code == httpx2.codes.OK and at < end and not _has_size_of(response, file):
                # the length was not told: of another page, as a portal or a proxy sends it
                out.truncate(have_bytes)
                out.seek(have_bytes)
                raise self._other_bytes()

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
            cause = " ".join(str(error).split())[:_CAUSE_LENGTH] or type(error).__name__
            raise HubUnreachableError(
                f"cannot reach {self.endpoint} ({cause}): check network, proxy and HF_ENDPOINT, then run the "
                "same command again; it goes on where it stopped",
                passing_cause=cause if isinstance(error, _PASSING_ERRORS) else "",
            ) from error
        except OSError as error:
            if file is not None:
                raise  # of `out`
            raise PullError(
                f"cannot ask {self.endpoint} ({' '.join(str(error).split())}): check what HF_HOME, "
                "HF_TOKEN_PATH and SSL_CERT_FILE name"
            ) from error
        except HFValidationError as error:
            raise NoSuchRepoError(f"{repo} can be no repo: check the name") from error
        except UnicodeEncodeError as error:
            raise NotAllowedError("HF_TOKEN has characters that no token has: correct or unset it") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise PullError(
                f"{self.endpoint} does not answer as a hub does ({type(error).__name__}): check HF_ENDPOINT"
            ) from error

    def _explain_status(self, status: int, repo: str) -> PullError:
        if status in (401, 403):
            return NotAllowedError(
                f"{self.endpoint} refuses access to {repo} (status {status}): set HF_TOKEN to a valid token "
                "that may read it, or unset it for a public repo"
            )
        if status in _BUSY_STATUSES or status >= 500:
            return self._busy(status)
        if status == _RANGE_NOT_SATISFIABLE:
            return self._other_bytes()
        return PullError(
            f"{self.endpoint} answers status {status} for {repo}: check HF_ENDPOINT; "
            f"`hf download {repo}` may have another way"
        )

    def _busy(self, status: int, wait_seconds: float = 0.0) -> PullError:
        return HubUnreachableError(
            f"{self.endpoint} is down or busy (status {status}): run the same command again later; it goes "
            "on where it stopped",
            passing_cause=f"status {status}",
            wait_seconds=wait_seconds,
        )

    def _other_bytes(self) -> PullError:
        return HubUnreachableError(
            f"{self.endpoint} sends more or less than it was asked for: run the same command again, "
            "without proxy or mirror (HF_ENDPOINT) if it happens twice"
        )


def _is_of(response: httpx2.Response, file: RemoteFile, first_byte: int) -> bool:
    """Whether it brings bytes of the file as it was listed, from `first_byte` on or all, by its headers."""
    if response.status_code == httpx2.codes.PARTIAL_CONTENT:
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        return found is not None and int(found[1]) == first_byte and found[2] in ("*", str(file.size_bytes))
    is_told = "content-length" in response.headers and "content-encoding" not in response.headers
    return response.status_code == httpx2.codes.OK and (not is_told or _has_size_of(response, file))


def _has_size_of(response: httpx2.Response, file: RemoteFile) -> bool:
    length = response.headers.get("content-length", "")
    return "content-encoding" not in response.headers and length == str(file.size_bytes)


def _retry_after_seconds(response: httpx2.Response) -> float:
    """0 = the hub does not say, or not in seconds."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() else 0.0
