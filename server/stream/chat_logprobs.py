"""Log probabilities → the objects of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from s2moe.engine.messages import TokenLogprob, TopLogprob

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


def token_logprobs(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """The `content` of `schema.chat.Logprobs`: an object per token."""
    return [{**_token(each), "top_logprobs": [_token(top) for top in each.top]} for each in logprobs]


def _token(each: TokenLogprob | TopLogprob) -> dict[str, Any]:
    """A token may be part of a character: its bytes say which, its text has U+FFFD there."""
    return {
        "token": each.piece.decode(errors="replace"),
        "bytes": list(each.piece),
        "logprob": max(LEAST_LOGPROB, each.logprob),
    }
