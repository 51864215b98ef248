"""Whole characters out of bytes that may be cut anywhere."""

from __future__ import annotations

import codecs


class Utf8Gate:
    """Holds back an incomplete character until its bytes arrive; invalid bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending = False
        """Whether an incomplete character is held back."""

    def feed(self, data: bytes) -> str:
        """Returns the characters that `data` completes."""
        if data.isascii() and not self.pending:
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Ends the text. A character that never became whole is dropped: the model was cut off inside it."""
        self._decoder.reset()
        self.pending = False
        return ""
