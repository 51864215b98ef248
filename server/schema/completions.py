"""`POST /v1/completions`: every request field declared once, with limits and description.

Unknown fields are ignored, but for those inside `s2moe`; null means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from s2moe.server.schema.chat import StreamOptions, Usage
from s2moe.server.schema.json_value import refuse
from s2moe.server.schema.prompts import Prompt, PromptForms, read_prompts
from s2moe.server.schema.sampling import SamplingFields, TokenLimit, fail
from s2moe.server.schema.speculation import Speculation
from s2moe.server.schema.timings import Timings

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 16
MAX_LOGPROBS = 5
_NO_SCHEMA = refuse("use `grammar`, or `response_format` of chat completions")
_REFUSED = "refused where set: use grammar, or response_format of chat completions"


def _check_format(value: object) -> None:
    if value and value != {"type": "text"}:
        raise fail("only `text` is supported here; use `grammar`, or chat completions")


class CompletionRequest(SamplingFields):
    """Body of a request to continue raw text."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    prompt: Annotated[list[Prompt], PlainValidator(read_prompts, json_schema_input_type=PromptForms)] = Field(
        description="text to continue, or its tokens; a list of either gives n choices for each, in this "
        "order. No chat template is applied; text such as <|im_end|> becomes the control token of that name"
    )
    model: str | None = Field(
        None, description="any name is served by the loaded model, unless the server runs with --strict-model"
    )
    stream: bool | None = Field(None, description="send the answer as server-sent events")
    stream_options: StreamOptions | None = Field(None, description="what else a stream holds")
    max_tokens: TokenLimit | None = Field(
        None,
        description=f"most tokens to generate per choice; absent = {DEFAULT_MAX_TOKENS}, -1 = as many as fit "
        "the context",
    )
    n: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description=f"choices per prompt, at most {MAX_CHOICES} of all prompts together; they are generated "
        "one after the other, and choice i of a prompt has the seed + i if there is one",
    )
    best_of: int | None = Field(
        None, ge=1, description="only the value of n: nothing is generated to be dropped"
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="give the log probability of each token, and of so many of the likeliest",
    )
    echo: bool | None = Field(
        None, description="begin each choice with its prompt; not together with logprobs"
    )
    suffix: str | None = Field(
        None, description="only empty: write the model's fill-in-the-middle tokens into the prompt instead"
    )
    ignore_eos: bool | None = Field(
        None, description="go on to max_tokens where the model would end; for benchmarks"
    )
    response_format: Annotated[Any, BeforeValidator(_check_format)] = Field(
        None, description="only of type text: use grammar, or chat completions"
    )
    json_schema: Annotated[Any, _NO_SCHEMA] = Field(None, description=_REFUSED)
    structured_outputs: Annotated[Any, _NO_SCHEMA] = Field(None, description=_REFUSED)
    guided_json: Annotated[Any, _NO_SCHEMA] = Field(None, description=_REFUSED)
    guided_regex: Annotated[Any, _NO_SCHEMA] = Field(None, description=_REFUSED)
    guided_choice: Annotated[Any, _NO_SCHEMA] = Field(None, description=_REFUSED)
    guided_grammar: Annotated[Any, _NO_SCHEMA] = Field(None, description=_REFUSED)
    regex: Annotated[Any, _NO_SCHEMA] = Field(None, description=_REFUSED)
    ebnf: Annotated[Any, _NO_SCHEMA] = Field(None, description=_REFUSED)

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def n_choices_per_prompt(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def problem(self) -> tuple[str, str] | None:
        """The first field that cannot be honoured beside the others, with the reason."""
        n = self.n_choices_per_prompt
        if len(self.prompt) * n > MAX_CHOICES:
            return (
                "prompt" if n == 1 else "n",
                f"{len(self.prompt)} prompts with {n} choices each are more than {MAX_CHOICES} choices; send "
                "several requests",
            )
        if self.best_of is not None and self.best_of != n:
            return "best_of", f"it must equal n, which is {n}: choices are not ranked; ask for n and choose"
        if self.suffix:
            return (
                "suffix",
                "text cannot be inserted before a suffix; write the model's fill-in-the-middle tokens into "
                "the prompt",
            )
        if self.echo and self.logprobs is not None:
            return "echo", "the prompt has no log probabilities; leave echo or logprobs out"
        return None


class CompletionLogprobs(BaseModel):
    """Parallel lists with one element per token of the text."""

    tokens: list[str] = Field(
        description=r"text of each token, or `bytes:\x…` for bytes that are no whole characters"
    )
    token_logprobs: list[float] = Field(
        description="of the model's own distribution, before penalties, grammar and temperature; at least "
        "-9999"
    )
    top_logprobs: list[dict[str, float]] = Field(
        description="the likeliest tokens, and the chosen one if it is not among them"
    )
    text_offset: list[int] = Field(description="where the token begins, in characters of the choice's text")


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """Answer of a request without stream. Chunks of a stream have the same form, with `finish_reason` null in
    all but the last of a choice, and `usage` in the last if asked for."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice] = Field(description="of the first prompt, of the second, …")
    usage: Usage
    timings: Timings
    speculation: Speculation | None = Field(None, description="there when the request had a speculator")
