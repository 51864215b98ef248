"""Token ids that clients send."""

from __future__ import annotations

from collections.abc import Sequence

from s2moe.engine.messages import ModelInfo
from s2moe.server.errors import InvalidRequestError


def check_token_ids(tokens: Sequence[int], model: ModelInfo | None, param: str) -> None:
    """Raises InvalidRequestError when one is not in the model's vocabulary; before the model is known,
    nothing is."""
    if model is None or not tokens:
        return
    largest = max(tokens)
    if min(tokens) < 0 or largest >= model.n_vocab:
        wrong = largest if largest >= model.n_vocab else min(tokens)
        raise InvalidRequestError(
            f"Invalid value for `{param}`: {wrong} is not a token of the model; its vocabulary has the ids 0 "
            f"to {model.n_vocab - 1}.",
            param=param,
        )
