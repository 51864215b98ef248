"""Structured logs with the request id of the running request in every line.

A call passes its fields as `extra={"fields": {...}}`; the formatters here write them. The text of prompts
and answers is never passed unless the setting log_prompts is on.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
from contextvars import ContextVar
from typing import Any

import msgspec

request_id_var: ContextVar[str | None] = ContextVar("request_id", default=None)

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def choose_request_id(given: str | None) -> str:
    """The client's id when it is safe to write to logs and headers, else a fresh one."""
    if given is not None and _SANE_REQUEST_ID.fullmatch(given):
        return given
    return "req-" + secrets.token_hex(12)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO s2moe.server.access request method=GET … request_id=…`"""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_quote(value)}" for key, value in _fields(record).items())
        line = f"{_timestamp(record)} {record.levelname} {record.name} {record.getMessage()}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def fit_for_log(name: str, most_characters: int = 40) -> str:
    """The beginning of a name that a client made up, without what a terminal or a reader would obey."""
    shown = name[:most_characters]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def configure_logging(level: str, log_format: str) -> None:
    """Sends all logs of the process to stderr. Called once, by the command line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Their info lines repeat ours; sse-starlette's debug lines would hold the text of answers.
    for name in ("uvicorn", "uvicorn.error", "sse_starlette", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, "fields", {}))
    request_id = request_id_var.get()
    if request_id is not None:
        fields.setdefault("request_id", request_id)
    return fields


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _quote(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text and re.fullmatch(r"[^\s\"=]+", text) else msgspec.json.encode(text).decode()
