"""The `llm` package, with the server as one of its extra OpenAI models."""

from __future__ import annotations

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from report import WRONG_KEY, Report, call, usage

report = Report()
home = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = home.name
# JSON is YAML
(Path(home.name) / "extra-openai-models.yaml").write_text(
    json.dumps(
        [
            {
                "model_id": "local",
                "model_name": report.model,
                "api_base": report.v1,
                "api_key_name": "local",
                "supports_tools": True,
                "supports_schema": True,
                "reasoning": False,
            }
        ]
    )
)

import llm  # noqa: E402

model = llm.get_model("local")


def get_weather(city: str) -> str:
    """How warm it is in a city."""
    return report.tool_results[city]


def prompt(name: str, *, key: str = report.key, **options: Any) -> Any:
    return model.prompt(report.prompts[name], key=key, **options)


def answer_of(response: Any) -> dict[str, Any]:
    text = response.text()
    counts = response.usage()
    return {"text": text, "usage": usage(counts.input, counts.output)}


def calls_of(response: Any) -> dict[str, Any]:
    response.text()
    calls = [call(each.name, each.arguments, each.tool_call_id) for each in response.tool_calls()]
    return {"calls": calls}


def failure(error: Exception) -> dict[str, Any]:
    return {"kind": type(error).__name__, "text": str(error)}


@report.case("chat")
def _() -> Any:
    return answer_of(prompt("chat", stream=False))


@report.case("stream")
def _() -> Any:
    return answer_of(prompt("chat", stream=True))


@report.case("one_call")
def _() -> Any:
    return calls_of(prompt("one_call", stream=False, tools=[get_weather]))


@report.case("one_call_stream")
def _() -> Any:
    return calls_of(prompt("one_call", stream=True, tools=[get_weather]))


@report.case("two_calls")
def _() -> Any:
    return calls_of(prompt("two_calls", stream=False, tools=[get_weather]))


@report.case("two_calls_stream")
def _() -> Any:
    return calls_of(prompt("two_calls", stream=True, tools=[get_weather]))


@report.case("tool_result")
def _() -> Any:
    chain = model.chain(report.prompts["one_call"], key=report.key, tools=[get_weather], stream=False)
    return {"text": chain.text()}


@report.case("schema")
def _() -> Any:
    return {"value": json.loads(prompt("schema", stream=False, schema=report.schema).text())}


@report.case("schema_stream")
def _() -> Any:
    return {"value": json.loads(prompt("schema", stream=True, schema=report.schema).text())}


@report.case("too_long")
def _() -> Any:
    try:
        prompt("too_long", stream=False).text()
    except Exception as error:
        return failure(error)


@report.case("wrong_key")
def _() -> Any:
    try:
        prompt("chat", key=WRONG_KEY, stream=False).text()
    except Exception as error:
        return failure(error)


@report.case("busy_once")
def _() -> Any:
    return {"text": prompt("busy_once", stream=False).text()}


report.print(version("llm"))
