"""Raw text for the model, in the four forms in which OpenAI's API takes it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from s2moe.server.schema.sampling import fail

Prompt = str | list[int]
"""Text, or its tokens."""

_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenList = Annotated[list[_TokenId], Field(min_length=1)]
PromptForms = (
    str
    | Annotated[list[str], Field(min_length=1)]
    | _TokenList
    | Annotated[list[str | _TokenList], Field(min_length=1)]
)
"""What clients may send, for the OpenAPI document."""


def read_prompts(value: object) -> list[Prompt]:
    """One prompt or several, from any of the forms. Faster than pydantic's union, and says what is wrong."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise fail("give a string, a list of strings, a list of token ids or a list of such lists")
    if type(value[0]) is int:
        return [_read_tokens(value, "the list")]
    return [
        each if isinstance(each, str) else _read_tokens(each, f"element {index}")
        for index, each in enumerate(value)
    ]


def _read_tokens(value: object, where: str) -> list[int]:
    if not isinstance(value, list):
        raise fail(f"{where} is neither a string nor a list of token ids")
    if not value:
        raise fail(f"{where} has no token ids")
    # by type: bool is an int, too
    if any(type(token) is not int for token in value):
        raise fail(f"{where} has something else than token ids in it")
    if min(value) < 0 or max(value) >= 2**31:
        raise fail(f"{where} has a number in it that is not a token id")
    return value
