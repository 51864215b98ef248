"""Request fields that hold any JSON: how deep it may go, and fields of other servers that are refused."""

from __future__ import annotations

from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from s2moe.server.schema.sampling import fail

MAX_DEPTH = 64
"""Of objects and lists in one another. What renders them and what turns schemas into grammars recurses."""
MAX_SCHEMA_BYTES = 256 * 1024


def fail_schema(message: str) -> PydanticCustomError:
    """The error of a validator of JSON schemas."""
    return PydanticCustomError("invalid_schema", "{reason}", {"reason": message})


def is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[object] = []
        for each in level:
            if isinstance(each, dict):
                deeper.extend(each.values())
            elif isinstance(each, list):
                deeper.extend(each)
        if not deeper:
            return False
        level = deeper
    return True


def _check_schema(value: object) -> object:
    if value is None:
        return value
    if not isinstance(value, dict):
        raise fail_schema("a JSON schema is an object")
    if is_too_deep(value):
        raise fail_schema(f"the schema is nested more than {MAX_DEPTH} levels deep")
    return value


def _check_parameters(value: object) -> object:
    _check_schema(value)
    kind = value.get("type", "object") if isinstance(value, dict) else "object"
    if kind != "object":
        raise fail_schema('the parameters of a function are a schema with `"type": "object"`')
    return value


def refuse(remedy: str) -> BeforeValidator:
    """The validator of a field that would change the answer and that this server does not have; null and
    empty values ask for nothing and pass."""

    def check(value: Any) -> None:
        if value:
            raise fail(f"the field is not supported; {remedy}")

    return BeforeValidator(check)


SCHEMA = BeforeValidator(_check_schema)
PARAMETERS = BeforeValidator(_check_parameters)
