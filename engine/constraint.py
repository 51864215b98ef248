"""What an answer must look like: the grammar that its sampler follows, and whom errors about it concern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from s2moe.engine.chat_options import ChatOptions
from s2moe.engine.errors import RequestError
from s2moe.engine.messages import Sampling

_SAMPLER_KEYS: Final = (
    "grammar",
    "grammar_lazy",
    "grammar_triggers",
    "preserved_tokens",
    "generation_prompt",
    "thinking",
)
"""Of what s2moe_chat_apply() returns, for s2moe_sampler_create()."""


@dataclass(frozen=True)
class Constraint:
    """A grammar, with the error that a request gets for it."""

    params: Mapping[str, Any]
    """Keys of s2moe_sampler_create()."""
    code: str
    param: str

    def refused(self, reason: str) -> RequestError:
        return RequestError(self.code, reason, param=self.param)

    @classmethod
    def of_request(cls, sampling: Sampling, thinking: Mapping[str, Any] | None = None) -> Constraint | None:
        """The request's own GBNF grammar. `thinking`: of s2moe_chat_apply(), for what it leaves free."""
        if not sampling.grammar:
            return None
        params: dict[str, Any] = {"grammar": sampling.grammar}
        if thinking is not None:
            params["thinking"] = thinking
        return cls(params, "invalid_grammar", "grammar")

    @classmethod
    def of_chat(cls, chat: Mapping[str, Any], options: ChatOptions) -> Constraint | None:
        """What tools or schema demand. `chat`: what s2moe_chat_apply() made of `options`."""
        if not chat.get("grammar"):
            return None
        params = {key: chat[key] for key in _SAMPLER_KEYS if key in chat}
        return cls(params, "invalid_schema", schema_param(options))


def schema_param(options: ChatOptions) -> str:
    """The field of the request whose schema is to blame for a grammar that cannot be used."""
    return "response_format" if options.has_schema else "tools"


def check_combination(sampling: Sampling, options: ChatOptions) -> None:
    """Raises RequestError for two grammars at once."""
    if not sampling.grammar:
        return
    for other, is_given in (("tools", options.has_tools), ("response_format", options.has_schema)):
        if is_given:
            raise RequestError(
                "invalid_value",
                f"grammar and {other} both say what the answer must look like; leave one of them out",
                param="grammar",
            )
