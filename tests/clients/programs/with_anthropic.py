"""The `anthropic` package on /v1/messages."""

from __future__ import annotations

from typing import Any

import anthropic
from pydantic import BaseModel
from report import WRONG_KEY, Report, call, usage

report = Report()
client = anthropic.Anthropic(base_url=report.url, api_key=report.key, max_retries=0)
TOOLS: Any = [
    {
        "name": report.tool["name"],
        "description": report.tool["description"],
        "input_schema": report.tool["parameters"],
    }
]


class Person(BaseModel):
    name: str
    age: int


def create(name: str, **fields: Any) -> Any:
    return client.messages.create(model=report.model, max_tokens=100, messages=report.ask(name), **fields)


def streamed(name: str, **fields: Any) -> Any:
    with client.messages.stream(
        model=report.model, max_tokens=100, messages=report.ask(name), **fields
    ) as stream:
        return stream.get_final_message()


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def answer_of(message: Any) -> dict[str, Any]:
    # Anthropic counts cached tokens apart from the others
    cached = message.usage.cache_read_input_tokens or 0
    return {
        "text": text_of(message),
        "finish": message.stop_reason,
        "usage": usage(message.usage.input_tokens + cached, message.usage.output_tokens, cached),
    }


def thought_of(message: Any) -> dict[str, Any]:
    thoughts = [block.thinking for block in message.content if block.type == "thinking"]
    return {"text": text_of(message), "reasoning": "".join(thoughts)}


def calls_of(message: Any) -> dict[str, Any]:
    calls = [call(each.name, each.input, each.id) for each in message.content if each.type == "tool_use"]
    return {"calls": calls, "finish": message.stop_reason}


def failure(error: anthropic.APIStatusError) -> dict[str, Any]:
    body: Any = error.body
    return {"status": error.status_code, "kind": type(error).__name__, "text": body["error"]["message"]}


@report.case("chat")
def _() -> Any:
    return answer_of(create("chat"))


@report.case("stream")
def _() -> Any:
    return answer_of(streamed("chat"))


@report.case("reasoning")
def _() -> Any:
    return thought_of(create("reasoning"))


@report.case("reasoning_stream")
def _() -> Any:
    return thought_of(streamed("reasoning"))


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
    message = create("one_call", tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": each.id, "content": report.tool_results["Paris"]}
        for each in message.content
        if each.type == "tool_use"
    ]
    messages: Any = [
        *report.ask("one_call"),
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    reply = client.messages.create(model=report.model, max_tokens=100, messages=messages, tools=TOOLS)
    return {"text": text_of(reply)}


@report.case("schema")
def _() -> Any:
    message = client.messages.parse(
        model=report.model, max_tokens=100, messages=report.ask("schema"), output_format=Person
    )
    return {"value": message.parsed_output.model_dump()}


@report.case("schema_stream")
def _() -> Any:
    return {"value": streamed("schema", output_format=Person).parsed_output.model_dump()}


@report.case("count_tokens")
def _() -> Any:
    counted = client.messages.count_tokens(model=report.model, messages=report.ask("chat"))
    return {"counted": counted.input_tokens > 0}


@report.case("too_long")
def _() -> Any:
    try:
        create("too_long")
    except anthropic.BadRequestError as error:
        return failure(error)


@report.case("wrong_key")
def _() -> Any:
    try:
        client.with_options(api_key=WRONG_KEY).messages.create(
            model=report.model, max_tokens=100, messages=report.ask("chat")
        )
    except anthropic.AuthenticationError as error:
        return failure(error)


@report.case("busy")
def _() -> Any:
    try:
        create("busy")
    except anthropic.RateLimitError as error:
        return failure(error)


@report.case("busy_once")
def _() -> Any:
    patient = client.with_options(max_retries=2)
    return {
        "text": text_of(
            patient.messages.create(model=report.model, max_tokens=100, messages=report.ask("busy_once"))
        )
    }


report.print(anthropic.__version__)
