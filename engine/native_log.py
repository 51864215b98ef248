"""llama.cpp's log as part of ours."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from typing import Any

logger = logging.getLogger(__name__)

GGML_LOG_LEVEL_ERROR = 4
_LOG_LEVELS = {3: logging.WARNING, GGML_LOG_LEVEL_ERROR: logging.ERROR}
"""ggml_log_level → ours; the rest of llama.cpp's chatter is for debugging."""
_EXPECTED = (
    "removing memory module entries",
    "failed to decode, ret = 2",
    "failed with error 1",
    "compute status: 1",
    "failed to parse grammar",
    "grammar does not contain a 'root' symbol",
    "unsupported grammar, left recursion detected",
)
"""What llama.cpp says when a decode is aborted, or a client's grammar is wrong: ordinary events here."""
_NO_MEMORY = (
    *("out of memory", "unable to allocate", "failed to allocate"),
    *("Cannot allocate memory", "std::bad_alloc"),
)
"""What it says where there is none left, on a GPU or in the machine."""
_NO_GPU = "failed to initialize CUDA"
"""What it says where it was built with CUDA and finds no GPU."""


_callbacks: list[Any] = []
"""llama.cpp calls the last one as long as the process lives, also when the model of its log is gone or never
came to be; so none of the few is ever freed."""


class NativeLog:
    """Routes llama.cpp's log into ours and remembers its last errors, which explain a failed load."""

    def __init__(self, llama_cpp: Any, *, needs_gpu: bool = False) -> None:
        """`needs_gpu`: whether it is an error that there is none."""
        self.errors: deque[str] = deque(maxlen=5)
        self._expected = _EXPECTED if needs_gpu else (*_EXPECTED, _NO_GPU)
        self._lock = threading.Lock()
        callback = llama_cpp.llama_log_callback(self._receive)
        _callbacks.append(callback)
        llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))

    def _receive(self, level: int, text: bytes, _user_data: Any) -> None:
        line = text.decode(errors="replace").strip()
        if not line:
            return
        is_expected = any(words in line for words in self._expected)
        if level == GGML_LOG_LEVEL_ERROR and not is_expected:
            with self._lock:
                self.errors.append(line)
        logger.log(logging.DEBUG if is_expected else _LOG_LEVELS.get(level, logging.DEBUG), "%s", line)

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether a remembered error says so."""
        with self._lock:
            return any(words in line for line in self.errors for words in _NO_MEMORY)

    def explain(self, default: str) -> str:
        """The oldest remembered error, which is usually the cause; later ones only report the failure."""
        with self._lock:
            return self.errors[0] if self.errors else default
