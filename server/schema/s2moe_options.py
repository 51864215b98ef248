"""The request field `s2moe`: what differs from the server's settings for this answer alone.

OpenAI's fields tolerate unknown neighbours; here an unknown key is an error, since a misspelt option would
silently measure something else.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from s2moe.server.speculation_names import MAX_EXPERTS, MAX_NODES, MAX_REUSE_STRENGTH, Method, Preset

_MAX_NAMED_KEYS = 5


class S2moeOptions(BaseModel):
    """How this answer is decoded. null or absent = as the server does by default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", hide_input_in_errors=True)

    speculation: Method | None = Field(None, description="how drafts are made; off = one token per step")
    preset: Preset | None = Field(
        None,
        description="how far drafts may bend the choice of experts: exact = not at all; takes the place of "
        "the server's preset with all that --exact or single settings changed in it",
    )
    exact: bool | None = Field(None, description="true = the preset exact, whatever else is said")
    draft_experts: int | None = Field(
        None, ge=0, le=MAX_EXPERTS, description="experts per token of a draft; 0 = a quarter of the model's"
    )
    max_nodes: int | None = Field(None, ge=1, le=MAX_NODES, description="drafts verified at once, at most")
    reuse_strength: float | None = Field(
        None, ge=0, le=MAX_REUSE_STRENGTH, description="pull of experts in use on doubtful drafts; 0 = none"
    )
    reuse_cap: int | None = Field(
        None,
        ge=0,
        le=MAX_EXPERTS,
        description="experts of a layer that count as in use, at least those of one token; 0 = twice as many",
    )
    error_budget: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the mixing weights that may go to experts that the router would not have "
        "chosen",
    )
    single_token_bias: bool | None = Field(
        None, description="bend the choice also where a token is evaluated alone"
    )
    adaptive: bool | None = Field(None, description="false = a fixed tree of drafts, and no pauses")
    reuse_gating: bool | None = Field(None, description="false = verify with the router's own choice")
    shared_context: bool | None = Field(
        None, description="false = drafts have a KV cache of their own; the server must have been started so"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        unknown = [key for key in value if key not in cls.model_fields]
        if unknown:
            import difflib

            shown = ", ".join(f"`{key[:40]}`" for key in unknown[:_MAX_NAMED_KEYS])
            close = difflib.get_close_matches(unknown[0][:40], cls.model_fields, n=1)
            remedy = (
                f"did you mean `{close[0]}`?" if close else f"the options are {', '.join(cls.model_fields)}"
            )
            # as a value: the template argument would read braces of a key as placeholders
            reason = f"unknown option {shown}; {remedy}"
            raise PydanticCustomError("invalid_value", "{reason}", {"reason": reason})
        return value
