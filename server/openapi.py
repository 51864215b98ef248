"""The OpenAPI document, with the request bodies that handlers read by themselves (`api.body.read_model`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from s2moe.server.schema.examples import EXAMPLES

_REF: Final = "#/components/schemas/"


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The argument `openapi_extra` of a route whose handler reads `model`, which must also be one of
    `app.BODY_MODELS`."""
    content: dict[str, Any] = {"schema": {"$ref": _REF + model.__name__}}
    if (examples := EXAMPLES.get(model.__name__)) is not None:
        content["examples"] = {title: {"value": body} for title, body in examples.items()}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def add_body_schemas(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Makes the application's OpenAPI document describe `models`, under the names of their classes.

    Building the document raises ValueError when another schema has the name of one of these or their parts.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        _, bodies = models_json_schema(
            [(model, "validation") for model in models], ref_template=_REF + "{model}"
        )
        for name, schema in bodies["$defs"].items():
            if schemas.setdefault(name, schema) != schema:
                app.openapi_schema = None
                raise ValueError(f"two different schemas are called {name}; rename one of the classes")
        return document

    app.openapi = openapi  # type: ignore[method-assign]
