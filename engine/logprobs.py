"""Log probabilities of chosen tokens and of the likeliest ones beside them."""

from __future__ import annotations

from typing import Any, Final

from s2moe.engine.errors import RequestError
from s2moe.engine.messages import TokenLogprob, TopLogprob
from s2moe.engine.native import Library, NativeError, Status
from s2moe.engine.vocabulary import Vocabulary

MAX_TOP_LOGPROBS: Final = 20


class LogprobReader:
    """Reads them from the logits of a context's last decode."""

    def __init__(self, library: Library, context: Any, vocabulary: Vocabulary, n_top: int) -> None:
        """`n_top`: how many of the likeliest. Raises RequestError when that is out of range."""
        if not 0 <= n_top <= MAX_TOP_LOGPROBS:
            raise RequestError(
                "invalid_value",
                f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}",
                param="top_logprobs",
            )
        self._library = library
        self._context = context
        self._vocabulary = vocabulary
        self._n_top = n_top

    def read(self, row: int, token: int) -> TokenLogprob:
        """`row`: index of the logits that chose `token`. Raises RequestError."""
        try:
            logprob, top = self._library.logprobs(self._context, row, token, self._n_top)
        except NativeError as error:
            code = "numeric_error" if error.status == Status.NUMERIC else "internal"
            raise RequestError(code, f"log probabilities failed: {error.message}") from error
        return TokenLogprob(
            token=token,
            piece=self._piece(token),
            logprob=logprob,
            top=[TopLogprob(token=other, piece=self._piece(other), logprob=value) for other, value in top],
        )

    def _piece(self, token: int) -> bytes:
        return self._vocabulary.piece(token, special=True)
