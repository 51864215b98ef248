"""Fields that decide how tokens are chosen and decoded: the same in all generating endpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from s2moe.engine.messages import Sampling, Speculation
from s2moe.server.schema.s2moe_options import S2moeOptions

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MOST_TOKENS = 2**31 - 1
"""More than any context has, and what the wire holds."""


def fail(message: str) -> PydanticCustomError:
    """The error of a validator, its text as it is."""
    # The template argument would read braces of the message as placeholders, so it travels as a value.
    return PydanticCustomError("invalid_value", "{reason}", {"reason": message})


def shown(value: object) -> str:
    """What a client sent as a type or role, for an error that names it."""
    return repr(value[:40]) if isinstance(value, str) else "that is no text"


def _stop_list(value: object) -> object:
    if value is None:
        return value
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fail("stop is a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise fail(f"at most {MAX_STOP_STRINGS} stop strings are allowed")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise fail(f"a stop string has at most {MAX_STOP_CHARACTERS} characters")
    if "" in stops:
        raise fail("a stop string must not be empty")
    return stops


def _token_biases(value: object) -> object:
    if value is None:
        return value
    if not isinstance(value, dict):
        raise fail("logit_bias is an object of token ids and numbers")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        # Up to ten digits: int() of a longer text is slow, and no vocabulary is that large.
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) < 2**31):
            raise fail(f"{token[:40]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise fail(f"the bias of token {token} is not a number from -100 to 100")
        biases[int(token)] = float(bias)
    return biases


def _within_wire(value: object) -> object:
    # `type`, since -1.0 and True are no numbers of tokens
    return MOST_TOKENS if type(value) is int and (value == -1 or value > MOST_TOKENS) else value


TokenLimit = Annotated[
    int,
    Field(ge=1),
    BeforeValidator(_within_wire, json_schema_input_type=Annotated[int, Field(ge=1)] | Literal[-1]),
]
"""Most tokens to generate. Clients of llama-server and LM Studio send -1 for as many as fit the context; that
is MOST_TOKENS here."""


class SamplingFields(BaseModel):
    """null means absent: the model's recommendation, or else llama.cpp's default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    temperature: float | None = Field(None, ge=0, le=2, description="0 = always the likeliest token")
    top_p: float | None = Field(
        None, ge=0, le=1, description="sample among the likeliest that sum to this; 0 = the likeliest alone"
    )
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="sample among this many; 0 or -1 = all")
    min_p: float | None = Field(None, ge=0, le=1, description="drop tokens below this share of the best one")
    seed: int | None = Field(None, description="taken modulo 2^32; absent or -1 = random")
    stop: Annotated[str | list[str] | None, BeforeValidator(_stop_list)] = Field(
        None, description=f"up to {MAX_STOP_STRINGS} strings that end the answer and are not part of it"
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="taken from the logits of tokens that occurred; 0 = none"
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="the same for each time that a token occurred; 0 = none"
    )
    repeat_penalty: float | None = Field(None, ge=0.001, le=100, description="1 = none")
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_token_biases)] = Field(
        None, description="token ids to values from -100 to 100"
    )
    grammar: str | None = Field(
        None, max_length=64 * 1024, description="GBNF grammar that the answer must match"
    )
    s2moe: S2moeOptions | None = Field(None, description="how this answer is decoded")

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def to_sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            seed=None if self.seed is None or self.seed == -1 else self.seed % 2**32,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repeat_penalty=self.repeat_penalty,
            logit_bias=self.logit_bias or {},
            grammar=self.grammar or None,
        )

    def to_speculation(self) -> Speculation:
        """The engine's form of the field `s2moe`."""
        options = self.s2moe
        if options is None:
            return Speculation()
        return Speculation(
            method=options.speculation,
            preset=options.preset,
            exact=options.exact,
            draft_experts=options.draft_experts,
            max_nodes=options.max_nodes,
            reuse_strength=options.reuse_strength,
            reuse_cap=options.reuse_cap,
            error_budget=options.error_budget,
            single_token_bias=options.single_token_bias,
            adaptive=options.adaptive,
            reuse_gating=options.reuse_gating,
            shared_context=options.shared_context,
        )
