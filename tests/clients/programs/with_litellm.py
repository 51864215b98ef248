"""LiteLLM with its `openai/` provider, and reasoning with `hosted_vllm/`."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch its price list

import litellm
from report import WRONG_KEY, Report, call, usage

report = Report()
TOOLS = [{"type": "function", "function": report.tool}]


def create(name: str, *, provider: str = "openai", **fields: Any) -> Any:
    given = {
        "model": f"{provider}/{report.model}",
        "messages": report.ask(name),
        "api_base": report.v1,
        "api_key": report.key,
        "max_retries": 0,
    }
    return litellm.completion(**(given | fields))


def streamed(name: str, **fields: Any) -> Any:
    """The completion that LiteLLM puts together of a stream."""
    messages = report.ask(name)
    chunks = list(create(name, stream=True, stream_options={"include_usage": True}, **fields))
    return litellm.stream_chunk_builder(chunks, messages=messages)


def answer_of(reply: Any) -> dict[str, Any]:
    (choice,) = reply.choices
    counts = reply.usage
    return {
        "text": choice.message.content,
        "finish": choice.finish_reason,
        "usage": usage(
            counts.prompt_tokens, counts.completion_tokens, counts.prompt_tokens_details.cached_tokens
        ),
    }


def thought_of(reply: Any) -> dict[str, Any]:
    message = reply.choices[0].message
    return {"text": message.content, "reasoning": message.reasoning_content}


def calls_of(reply: Any) -> dict[str, Any]:
    (choice,) = reply.choices
    calls = [call(each.function.name, each.function.arguments, each.id) for each in choice.message.tool_calls]
    return {"calls": calls, "finish": choice.finish_reason}


def failure(error: Any) -> dict[str, Any]:
    return {"status": error.status_code, "kind": type(error).__name__, "text": str(error)}


@report.case("chat")
def _() -> Any:
    return answer_of(create("chat"))


@report.case("stream")
def _() -> Any:
    return answer_of(streamed("chat"))


@report.case("reasoning")
def _() -> Any:
    return thought_of(create("reasoning", provider="hosted_vllm"))


@report.case("reasoning_stream")
def _() -> Any:
    return thought_of(streamed("reasoning", provider="hosted_vllm"))


@report.case("one_call")
def _() -> Any:
    return calls_of(create("one_call", tools=TOOLS))


@report.case("one_call_stream")
def _() -> Any:
    return calls_of(streamed("one_call", tools=TOOLS))


@report.case("two_calls")
def _() -> Any:
    return calls_of(create("two_calls", tools=TOOLS))


@report.case("two_calls_stream")
def _() -> Any:
    return calls_of(streamed("two_calls", tools=TOOLS))


@report.case("tool_result")
def _() -> Any:
    message = create("one_call", tools=TOOLS).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": report.tool_results["Paris"]}
        for each in message.tool_calls
    ]
    messages = [*report.ask("one_call"), message.model_dump(), *results]
    return {"text": create("one_call", messages=messages, tools=TOOLS).choices[0].message.content}


@report.case("schema")
def _() -> Any:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": report.schema, "strict": True},
    }
    return {"value": json.loads(create("schema", response_format=form).choices[0].message.content)}


@report.case("too_long")
def _() -> Any:
    try:
        create("too_long")
    except litellm.ContextWindowExceededError as error:
        return failure(error)


@report.case("wrong_key")
def _() -> Any:
    try:
        create("chat", api_key=WRONG_KEY)
    except litellm.AuthenticationError as error:
        return failure(error)


@report.case("busy")
def _() -> Any:
    try:
        create("busy")
    except litellm.RateLimitError as error:
        return failure(error)


@report.case("busy_once")
def _() -> Any:
    return {"text": create("busy_once", max_retries=2).choices[0].message.content}


report.print(version("litellm"))
