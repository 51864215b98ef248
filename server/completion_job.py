"""Text completion request → the engine's requests: what cannot be said of one field alone is checked here."""

from __future__ import annotations

import uuid

import msgspec

from s2moe.engine.messages import Generate, ModelInfo, Sampling
from s2moe.server.answering import Job
from s2moe.server.errors import ContextLengthError, InvalidRequestError
from s2moe.server.schema.completions import CompletionRequest
from s2moe.server.schema.prompts import Prompt
from s2moe.server.token_ids import check_token_ids

API = "completions"


def completion_job(body: CompletionRequest, model: ModelInfo | None) -> Job:
    """One Generate for each choice: those of the first prompt come first.

    Raises InvalidRequestError with the `param` at fault.
    """
    if (problem := body.problem()) is not None:
        param, message = problem
        raise InvalidRequestError(f"Invalid value for `{param}`: {message}.", param=param)
    check_generates(model)
    for prompt in body.prompt:
        _check_prompt(prompt, model)
    sampling = body.to_sampling()
    return Job(
        API,
        [
            _to_generate(body, prompt, seeded(sampling, index))
            for prompt in body.prompt
            for index in range(body.n_choices_per_prompt)
        ],
    )


def check_generates(model: ModelInfo | None) -> None:
    """Raises InvalidRequestError for a model that gives embeddings only."""
    if model is None or not model.gives_embeddings:
        return
    raise InvalidRequestError(
        f"The model {model.name} gives embeddings and generates no text; use /v1/embeddings.",
        code="unsupported_model",
        param="model",
    )


def seeded(sampling: Sampling, choice: int) -> Sampling:
    """With one seed for all, the choices of a prompt would be copies of each other."""
    if sampling.seed is None or choice == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) % 2**32)


def _to_generate(body: CompletionRequest, prompt: Prompt, sampling: Sampling) -> Generate:
    """The engine's form of one choice. Its id is ours, not the client's, so that it is unique."""
    return Generate(
        request_id=uuid.uuid4().hex,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_tokens=None if isinstance(prompt, str) else prompt,
        sampling=sampling,
        max_tokens=body.token_limit,
        stop=body.stop_strings,
        speculation=body.to_speculation(),
        n_top_logprobs=body.logprobs,
        ignore_eos=bool(body.ignore_eos),
    )


def _check_prompt(prompt: Prompt, model: ModelInfo | None) -> None:
    """The engine would refuse the same, but until then the prompt would take memory in the queue."""
    if isinstance(prompt, str):
        least = (
            len(prompt.encode()) // model.longest_piece_bytes if model and model.longest_piece_bytes else 0
        )
    else:
        check_token_ids(prompt, model, "prompt")
        least = len(prompt)
    if model is None or least < model.n_ctx:
        return
    what = f"the prompt has{' at least' if isinstance(prompt, str) else ''}"
    raise ContextLengthError(what, n_tokens=least, n_ctx=model.n_ctx, param="prompt")
