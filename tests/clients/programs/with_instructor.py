"""instructor over the `openai` package, in the modes that a local server is used with."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import instructor
import openai
from pydantic import BaseModel
from report import WRONG_KEY, Report

report = Report()


class Person(BaseModel):
    name: str
    age: int


class get_weather(BaseModel):  # noqa: N801
    """How warm it is in a city."""

    city: str


def client(mode: Any, **options: Any) -> Any:
    given = {"base_url": report.v1, "api_key": report.key, "max_retries": 0}
    return instructor.from_openai(openai.OpenAI(**(given | options)), mode=mode)


def create(mode: Any, name: str = "schema", model: Any = Person, **options: Any) -> Any:
    return client(mode, **options).chat.completions.create(
        model=report.model, messages=report.ask(name), response_model=model, max_retries=1
    )


def failure(error: BaseException) -> dict[str, Any]:
    """instructor wraps what the openai package raises."""
    while error is not None and not isinstance(error, openai.APIStatusError):
        error = error.__cause__ or error.args[0]
    return {"status": error.status_code, "code": error.code, "text": error.message}


@report.case("schema")
def _() -> Any:
    return {"value": create(instructor.Mode.JSON_SCHEMA).model_dump()}


@report.case("schema_by_tool")
def _() -> Any:
    return {"value": create(instructor.Mode.TOOLS).model_dump()}


@report.case("schema_stream")
def _() -> Any:
    parts = client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
        model=report.model, messages=report.ask("schema"), response_model=Person
    )
    return {"value": list(parts)[-1].model_dump()}


@report.case("schema_by_tool_stream")
def _() -> Any:
    parts = client(instructor.Mode.TOOLS).chat.completions.create_partial(
        model=report.model, messages=report.ask("schema"), response_model=Person
    )
    return {"value": list(parts)[-1].model_dump()}


@report.case("two_calls")
def _() -> Any:
    found = create(instructor.Mode.PARALLEL_TOOLS, "two_calls", Iterable[get_weather])
    calls = [{"name": type(each).__name__, "arguments": each.model_dump()} for each in found]
    return {"calls": calls}


@report.case("chat")
def _() -> Any:
    reply = client(instructor.Mode.TOOLS).chat.completions.create(
        model=report.model, messages=report.ask("chat"), response_model=None
    )
    return {"text": reply.choices[0].message.content}


@report.case("too_long")
def _() -> Any:
    try:
        create(instructor.Mode.JSON_SCHEMA, "too_long")
    except Exception as error:
        return failure(error)


@report.case("wrong_key")
def _() -> Any:
    try:
        create(instructor.Mode.JSON_SCHEMA, api_key=WRONG_KEY)
    except Exception as error:
        return failure(error)


@report.case("busy")
def _() -> Any:
    try:
        create(instructor.Mode.JSON_SCHEMA, "busy")
    except Exception as error:
        return failure(error)


report.print(version("instructor"))
