"""A model's file, before and after llama.cpp reads it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from s2moe.engine.errors import EngineStartError
from s2moe.engine.messages import Configure
from s2moe.engine.native import NativeError, Status
from s2moe.engine.regular_file import check_regular

logger = logging.getLogger(__name__)

GGUF_MAGIC = b"GGUF"


def check_file(path: Path) -> None:
    """The plain mistakes, so that they get a plain message."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except FileNotFoundError:
        raise EngineStartError("model_not_found", f"model {path} does not exist; check the path") from None
    except OSError as error:
        raise EngineStartError(
            "model_unreadable",
            f"model {path} cannot be read: {error.strerror}; check the path and its permissions",
        ) from None
    if magic != GGUF_MAGIC:
        raise EngineStartError(
            "model_invalid",
            f"model {path} is not a GGUF file; convert it with llama.cpp or pick another file",
        )


def drop_page_cache(files: tuple[str, ...]) -> None:
    """Tells the kernel that what was read of these files is not needed again: the weights have been copied,
    and pages in the cache would count towards a container's limit."""
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            logger.warning("the page cache keeps %s: %s", file, error.strerror)
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def about(path: Path | str, error: NativeError) -> str:
    """The error's message with the file in front, which many begin with already."""
    return error.message if error.message.startswith(f"{path}: ") else f"{path}: {error.message}"


def open_failure(error: NativeError, configure: Configure) -> tuple[str, str]:
    """Code and message for an expert cache that cannot be opened."""
    name = Path(configure.model_path).name
    if error.status == Status.UNSUPPORTED:
        remedy = "" if "; use --" in error.message else "; use --reader auto or --io buffered"
        is_asked = configure.reader != "auto" or configure.io != "auto"
        return (
            "reader_unavailable" if is_asked else "reader_failed",
            f"experts of {name} cannot be read as asked: {error.message}{remedy}",
        )
    if error.status == Status.INVALID:
        return "invalid_setting", f"--io, --reader or --expert-policy: {error.message}"
    return (
        "model_invalid",
        f"cannot load {about(configure.model_path, error)}",
    )
