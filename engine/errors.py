"""What can go wrong in the engine, by who must act: client (RequestError) or operator (EngineStartError)."""

from __future__ import annotations


class RequestError(Exception):
    """This request cannot be answered; the engine is fine. Becomes a `Failed` message."""

    def __init__(
        self, code: str, message: str, *, param: str | None = None, n_prompt_tokens: int = 0, n_ctx: int = 0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class RequestAbortedError(Exception):
    """The running native call was told to stop."""


class EngineStartError(Exception):
    """The engine cannot serve with this configuration; `message` is one line with the remedy. By `code` the
    front end tells wrong settings (messages.WRONG_SETTING_CODES) from what may pass."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
