"""Tokens, the chat template and counts: llama-server's endpoints, under its names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from s2moe.server.schema.sampling import fail


def _check_tokens(value: object) -> object:
    """Faster than pydantic's own list, and says at once what is wrong."""
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise fail("give a list of token ids")
    if value and (min(value) < 0 or max(value) >= 2**31):
        raise fail("a number in it is not a token id")
    return value


class TokenizeRequest(BaseModel):
    """Body of a request for the tokens of a text."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    content: str = Field(description="the text")
    add_special: bool | None = Field(
        None, description="add what the model wants around a prompt, such as BOS (default: false)"
    )
    parse_special: bool | None = Field(
        None, description="read text such as <|im_end|> as the control token of that name (default: true)"
    )
    with_pieces: bool | None = Field(None, description="give the text of each token too (default: false)")


class TokenPiece(BaseModel):
    id: int
    piece: str | list[int] = Field(description="text of the token, or its bytes where they are not UTF-8")


class Tokens(BaseModel):
    tokens: list[int] | list[TokenPiece] = Field(description="ids, or with with_pieces objects")


class DetokenizeRequest(BaseModel):
    """Body of a request for the text of tokens."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    tokens: Annotated[
        list[int],
        BeforeValidator(_check_tokens, json_schema_input_type=list[Annotated[int, Field(ge=0, lt=2**31)]]),
    ] = Field(description="ids of the model's vocabulary")


class Detokenization(BaseModel):
    content: str = Field(description="text of the tokens; U+FFFD for what is not UTF-8")


class RenderedPrompt(BaseModel):
    prompt: str = Field(description="what the model would read")


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int = Field(description="tokens of the prompt that the messages and tools become")
