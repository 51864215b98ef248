"""Tools that a model may call, and what its answer must look like: parts of a chat request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from s2moe.server.schema.json_value import PARAMETERS, SCHEMA, fail_schema
from s2moe.server.schema.sampling import fail, shown

MAX_TOOLS = 128
NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,64}$"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def _check_type(value: object) -> object:
    if value != "function":
        raise fail(f"tools of type {shown(value)} are not supported; send tools of type 'function'")
    return value


def _check_choice(value: object) -> object:
    """Checks all, because the errors of a union would name its members, which no client knows."""
    if value is None or value in ("none", "auto", "required"):
        return value
    if not isinstance(value, dict):
        raise fail('use none, auto, required, or {"type": "function", "function": {"name": …}}')
    if value.get("type") != "function":
        raise fail(f"a choice of type {shown(value.get('type'))} is not supported; use `function`")
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise fail('a choice of type function names it: {"type": "function", "function": {"name": …}}')
    return value


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = Field(None, description="what it is for, read by the model")
    parameters: Annotated[dict[str, Any] | None, PARAMETERS] = Field(
        None, description="JSON schema of its arguments, an object; null = none"
    )
    strict: bool | None = Field(
        None,
        description="true = refuse parameters with a part that calls cannot be held to; else only that part "
        "is left to the model",
    )


class Tool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Annotated[Literal["function"], BeforeValidator(_check_type)]
    function: FunctionDefinition

    def to_wire(self) -> dict[str, Any]:
        """The tool as the engine expects it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {**_ANY_OBJECT, "properties": {}}
        if self.function.strict is not None:
            function["strict"] = self.function.strict
        return {"type": "function", "function": function}


class ChosenFunction(BaseModel):
    name: str


class NamedToolChoice(BaseModel):
    """Only this tool is offered, and it must be called."""

    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | None, BeforeValidator(_check_choice)
]


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str | None = Field(None, pattern=NAME_PATTERN)
    description: str | None = Field(None, description="accepted and ignored")
    schema_: Annotated[dict[str, Any], SCHEMA] = Field(
        alias="schema", description="JSON schema that the answer's content matches"
    )
    strict: bool | None = Field(
        None,
        description="true = an error for a schema of which a part cannot be enforced; the content matches "
        "the rest with and without it (docs/api.md has the keywords)",
    )


class ResponseFormat(BaseModel):
    """What the content of the answer must be. Reasoning before it is free."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="with the type json_schema")
    schema_: Annotated[dict[str, Any] | None, SCHEMA] = Field(
        None, alias="schema", description="with the type json_object: a schema in addition"
    )

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise fail('the type json_schema needs `json_schema`: {"name": …, "schema": …}')
        # A schema is never dropped in silence.
        if self.type != "json_schema" and self.json_schema is not None:
            raise fail("`json_schema` needs the type json_schema")
        if self.type != "json_object" and self.schema_ is not None:
            raise fail_schema("`schema` belongs into `json_schema`, or needs the type json_object")
        return self

    @property
    def is_strict(self) -> bool:
        return self.json_schema is not None and self.json_schema.strict is True

    @property
    def content_schema(self) -> dict[str, Any] | None:
        """JSON schema of the content; None = any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return self.schema_ or _ANY_OBJECT if self.type == "json_object" else None
