"""What goes wrong with the model while it serves, said to the operator without a line per request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

MIN_INTERVAL_SECONDS: Final = 10.0
"""Between two lines, however often the state changes."""


class FaultLog:
    """Logs one line when decodes of `model_path` begin to fail, and one when they fail in another way."""

    def __init__(self, model_path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model_path = model_path
        self._clock = clock
        self._state = ""
        """The message that was logged last; empty: all is well."""
        self._due = 0.0

    def failed(self, message: str) -> None:
        if message == self._state or self._clock() < self._due:
            return
        self._state = message
        self._due = self._clock() + MIN_INTERVAL_SECONDS
        logger.error("the model %s cannot be computed with: %s", self._model_path, message)

    def worked(self) -> None:
        self._state = ""
