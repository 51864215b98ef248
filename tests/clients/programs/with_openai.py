"""The `openai` package for Python."""

from __future__ import annotations

from typing import Any

import openai
from pydantic import BaseModel
from report import WRONG_KEY, Report, call, usage

report = Report()
client = openai.OpenAI(base_url=report.v1, api_key=report.key, max_retries=0)
TOOLS: Any = [{"type": "function", "function": report.tool}]
USAGE = {"include_usage": True}


class Person(BaseModel):
    name: str
    age: int


def create(name: str, **fields: Any) -> Any:
    return client.chat.completions.create(model=report.model, messages=report.ask(name), **fields)


def usage_of(counts: Any) -> dict[str, int]:
    return usage(counts.prompt_tokens, counts.completion_tokens, counts.prompt_tokens_details.cached_tokens)


def calls_of(choice: Any) -> dict[str, Any]:
    calls = [call(each.function.name, each.function.arguments, each.id) for each in choice.message.tool_calls]
    return {"calls": calls, "finish": choice.finish_reason}


def helped(name: str, **fields: Any) -> Any:
    """The completion that the stream helper puts together."""
    with client.chat.completions.stream(
        model=report.model, messages=report.ask(name), stream_options=USAGE, **fields
    ) as stream:
        stream.until_done()
        return stream.get_final_completion()


def failure(error: openai.APIStatusError) -> dict[str, Any]:
    return {
        "status": error.status_code,
        "kind": type(error).__name__,
        "code": error.code,
        "text": error.message,
    }


@report.case("chat")
def _() -> Any:
    reply = create("chat")
    (choice,) = reply.choices
    return {
        "text": choice.message.content,
        "finish": choice.finish_reason,
        "usage": usage_of(reply.usage),
        "id": reply.id,
    }


@report.case("stream")
def _() -> Any:
    chunks = list(create("chat", stream=True, stream_options=USAGE))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert len({chunk.id for chunk in chunks}) == 1
    return {
        "text": "".join(choice.delta.content or "" for choice in choices),
        "finish": choices[-1].finish_reason,
        "usage": usage_of(chunks[-1].usage),
        "id": chunks[0].id,
    }


@report.case("helper")
def _() -> Any:
    reply = helped("chat")
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    return {
        "text": choice.message.content,
        "finish": choice.finish_reason,
        "usage": usage_of(reply.usage),
        "id": reply.id,
    }


@report.case("reasoning")
def _() -> Any:
    message = create("reasoning").choices[0].message
    return {"text": message.content, "reasoning": message.reasoning_content}


@report.case("reasoning_stream")
def _() -> Any:
    deltas = [chunk.choices[0].delta for chunk in create("reasoning", stream=True)]
    return {
        "text": "".join(delta.content or "" for delta in deltas),
        "reasoning": "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas),
    }


@report.case("one_call")
def _() -> Any:
    return calls_of(create("one_call", tools=TOOLS).choices[0])


@report.case("one_call_stream")
def _() -> Any:
    return calls_of(helped("one_call", tools=TOOLS).choices[0])


@report.case("two_calls")
def _() -> Any:
    return calls_of(create("two_calls", tools=TOOLS, parallel_tool_calls=True).choices[0])


@report.case("two_calls_stream")
def _() -> Any:
    return calls_of(helped("two_calls", tools=TOOLS, parallel_tool_calls=True).choices[0])


@report.case("tool_result")
def _() -> Any:
    messages: Any = report.ask("one_call")
    message = create("one_call", tools=TOOLS).choices[0].message
    messages.append(message)
    for each in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": each.id, "content": report.tool_results["Paris"]})
    reply = client.chat.completions.create(model=report.model, messages=messages, tools=TOOLS)
    return {"text": reply.choices[0].message.content}


@report.case("schema")
def _() -> Any:
    reply = client.chat.completions.parse(
        model=report.model, messages=report.ask("schema"), response_format=Person
    )
    return {"value": reply.choices[0].message.parsed.model_dump()}


@report.case("schema_stream")
def _() -> Any:
    return {"value": helped("schema", response_format=Person).choices[0].message.parsed.model_dump()}


@report.case("too_long")
def _() -> Any:
    try:
        create("too_long")
    except openai.BadRequestError as error:
        return failure(error)


@report.case("too_long_stream")
def _() -> Any:
    try:
        create("too_long", stream=True)
    except openai.BadRequestError as error:
        return failure(error)


@report.case("wrong_key")
def _() -> Any:
    try:
        client.with_options(api_key=WRONG_KEY).models.list()
    except openai.AuthenticationError as error:
        return failure(error)


@report.case("busy")
def _() -> Any:
    try:
        create("busy")
    except openai.RateLimitError as error:
        return failure(error)


@report.case("busy_once")
def _() -> Any:
    patient = client.with_options(max_retries=2)
    reply = patient.chat.completions.create(model=report.model, messages=report.ask("busy_once"))
    return {"text": reply.choices[0].message.content}


@report.case("models")
def _() -> Any:
    return {"models": [model.id for model in client.models.list()]}


@report.case("responses")
def _() -> Any:
    reply = client.responses.create(model=report.model, input=report.prompts["chat"])
    details = reply.usage.input_tokens_details
    return {
        "text": reply.output_text,
        "usage": usage(reply.usage.input_tokens, reply.usage.output_tokens, details.cached_tokens),
    }


@report.case("responses_stream")
def _() -> Any:
    with client.responses.stream(model=report.model, input=report.prompts["chat"]) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text
    return {"text": final.output_text}


report.print(openai.__version__)
