"""langchain-openai's `ChatOpenAI`."""

from __future__ import annotations

from functools import reduce
from importlib.metadata import version
from operator import add
from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from report import WRONG_KEY, Report, call, usage

report = Report()


def chat_model(**options: Any) -> ChatOpenAI:
    given = {"base_url": report.v1, "api_key": report.key, "max_retries": 0, "stream_usage": True}
    return ChatOpenAI(model=report.model, **(given | options))


model = chat_model()
with_tools = model.bind_tools([{"type": "function", "function": report.tool}])


def answer_of(message: Any) -> dict[str, Any]:
    counts = message.usage_metadata
    return {
        "text": message.content,
        "finish": message.response_metadata["finish_reason"],
        "usage": usage(
            counts["input_tokens"], counts["output_tokens"], counts["input_token_details"]["cache_read"]
        ),
    }


def calls_of(message: Any) -> dict[str, Any]:
    assert not message.invalid_tool_calls, message.invalid_tool_calls
    return {
        "calls": [call(each["name"], each["args"], each["id"]) for each in message.tool_calls],
        "finish": message.response_metadata["finish_reason"],
    }


def failure(error: openai.APIStatusError) -> dict[str, Any]:
    return {"status": error.status_code, "code": error.code, "text": error.message}


@report.case("chat")
def _() -> Any:
    return answer_of(model.invoke(report.prompts["chat"]))


@report.case("stream")
def _() -> Any:
    return answer_of(reduce(add, model.stream(report.prompts["chat"])))


@report.case("one_call")
def _() -> Any:
    return calls_of(with_tools.invoke(report.prompts["one_call"]))


@report.case("one_call_stream")
def _() -> Any:
    return calls_of(reduce(add, with_tools.stream(report.prompts["one_call"])))


@report.case("two_calls")
def _() -> Any:
    return calls_of(with_tools.invoke(report.prompts["two_calls"]))


@report.case("two_calls_stream")
def _() -> Any:
    return calls_of(reduce(add, with_tools.stream(report.prompts["two_calls"])))


@report.case("tool_result")
def _() -> Any:
    asked = HumanMessage(report.prompts["one_call"])
    message = with_tools.invoke([asked])
    results = [
        ToolMessage(report.tool_results[each["args"]["city"]], tool_call_id=each["id"])
        for each in message.tool_calls
    ]
    return {"text": with_tools.invoke([asked, message, *results]).content}


@report.case("schema")
def _() -> Any:
    return {"value": model.with_structured_output(report.schema).invoke(report.prompts["schema"])}


@report.case("schema_stream")
def _() -> Any:
    parts = list(model.with_structured_output(report.schema).stream(report.prompts["schema"]))
    return {"value": parts[-1]}


@report.case("too_long")
def _() -> Any:
    try:
        model.invoke(report.prompts["too_long"])
    except openai.BadRequestError as error:
        return failure(error)


@report.case("wrong_key")
def _() -> Any:
    try:
        chat_model(api_key=WRONG_KEY).invoke(report.prompts["chat"])
    except openai.AuthenticationError as error:
        return failure(error)


@report.case("busy")
def _() -> Any:
    try:
        model.invoke(report.prompts["busy"])
    except openai.RateLimitError as error:
        return failure(error)


@report.case("busy_once")
def _() -> Any:
    return {"text": chat_model(max_retries=2).invoke(report.prompts["busy_once"]).content}


report.print(version("langchain-openai"))
