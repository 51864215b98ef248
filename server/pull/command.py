"""The command `s2moe pull`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, Final

from s2moe.server.pull.errors import InterruptedPullError, PullError

REQUIREMENTS: Final = ("huggingface-hub>=2.4,<3", "httpx2>=2,<3")
"""The extra `pull` of pyproject.toml."""

_REPO_FILE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>.+))?", re.ASCII)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model from a Hugging Face hub",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent(
            """\
            Download a GGUF model, all parts of a split one, and check it against the hub's sha256. A
            download that was cut off goes on where it stopped when the same command is run again.
            HF_TOKEN is sent to the hub, HF_ENDPOINT names another one than huggingface.co.
            """
        ),
        epilog=textwrap.dedent(
            """\
            exit codes: 0 done, 1 other failure, 2 wrong usage, 3 hub unreachable, down or busy, 4 no such
            repo, 5 no such file, or several that fit, 6 gated, or token refused, 7 disk full, 8 wrong
            checksum, 130 interrupted
            """
        ),
    )
    parser.add_argument(
        "model",
        type=_repo_file,
        metavar="REPO[:FILE]",
        help="repo as owner/name; FILE is one of its files, or a quantisation such as Q4_K_M (default: the "
        "only model, or Q4_K_M)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="PATH",
        help="folder for the model (default: models in the cache directory, which S2MOE_CACHE_DIR moves)",
    )


def run(arguments: dict[str, Any]) -> int:
    """Raises PullError."""
    repo, wanted = arguments["model"]
    directory = _models_directory() if arguments["dir"] is None else arguments["dir"].expanduser().absolute()
    # read when huggingface_hub is imported; it would ask the hub who is at the keyboard
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from s2moe.server.pull.hub import Hub
    except ImportError as error:
        raise PullError(_missing_text()) from error
    except ValueError as error:  # what it reads when it is imported
        raise PullError(f"huggingface_hub does not start ({error}): correct the variables HF_…") from error
    except KeyboardInterrupt:
        raise InterruptedPullError("interrupted before anything was asked for") from None
    from s2moe.server.pull.download import pull
    from s2moe.server.pull.progress import progress_on

    path = pull(Hub(), repo, wanted, directory, progress_on())
    print(shlex.join([*_this_program(), "serve", "--model", str(path)]))
    return 0


def _this_program() -> list[str]:
    """As it was called."""
    called = Path(sys.argv[0])
    if called.name != "s2moe":
        return [sys.executable, "-m", "s2moe.server"]
    # the kernel gives what was found on the PATH its whole name
    return [called.name if shutil.which(called.name) == sys.argv[0] else sys.argv[0]]


def _models_directory() -> Path:
    from s2moe.engine.cache_directory import cache_directory

    try:
        return cache_directory().absolute() / "models"
    except RuntimeError as error:
        raise PullError("this user has no home directory: choose a folder with --dir") from error


def _missing_text() -> str:
    requirements = " ".join(shlex.quote(each) for each in REQUIREMENTS)
    return f"s2moe pull needs huggingface_hub: run {sys.executable} -m pip install {requirements}"


def _repo_file(text: str) -> tuple[str, str | None]:
    match = _REPO_FILE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not REPO[:FILE], such as owner/name:Q4_K_M")
    return match["repo"], match["file"]
