"""Log probabilities → the four lists of OpenAI's text completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Final

from s2moe.engine.messages import TokenLogprob, TopLogprob
from s2moe.server.stream.chat_logprobs import LEAST_LOGPROB

_FIRST_INNER_BYTE: Final = 0x80
_FIRST_LEADING_BYTE: Final = 0xC0


class TextLogprobs:
    """Converts what the steps of one choice carry, in their order: offsets count on."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_characters = 0

    def convert(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The fields of `schema.completions.CompletionLogprobs`. Of two tokens of the same text the likelier
        one is in `top_logprobs`."""
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for each in logprobs:
            top: dict[str, float] = {}
            likeliest: list[TopLogprob | TokenLogprob] = [*each.top, each]
            for other in likeliest:
                top.setdefault(piece_text(other.piece), _finite(other.logprob))
            tops.append(top)
            offsets.append(self._offset_of(each.piece))
            self._n_characters += len(self._decoder.decode(each.piece))
        return {
            "tokens": [piece_text(each.piece) for each in logprobs],
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _offset_of(self, piece: bytes) -> int:
        """Where the next token begins: a token that goes on with a character begins in it."""
        if piece and not _FIRST_INNER_BYTE <= piece[0] < _FIRST_LEADING_BYTE:
            # what was begun will never be whole
            self._n_characters += len(self._decoder.decode(b"", final=True))
        return self._n_characters


def piece_text(piece: bytes) -> str:
    r"""`bytes:\xe2\x96` for what is not text by itself, as OpenAI writes it."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)
