"""Names under which chat completions and other servers take a schema or grammar of the answer."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from s2moe.server.schema.sampling import fail

_REFUSED = "refused where set: a protocol has its own field for the form of an answer"


class ForeignFormats(BaseModel):
    """Base of requests whose protocol has a field of its own for the form of an answer: none of the other
    names is ignored, since a client that sends a schema relies on it."""

    FORMAT_FIELD: ClassVar[str]
    """The protocol's own field."""

    response_format: Any = Field(None, description=_REFUSED)
    json_schema: Any = Field(None, description=_REFUSED)
    structured_outputs: Any = Field(None, description=_REFUSED)
    guided_json: Any = Field(None, description=_REFUSED)
    guided_regex: Any = Field(None, description=_REFUSED)
    guided_choice: Any = Field(None, description=_REFUSED)
    guided_grammar: Any = Field(None, description=_REFUSED)
    regex: Any = Field(None, description=_REFUSED)
    ebnf: Any = Field(None, description=_REFUSED)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> Any:
        # also called for the fields of subclasses
        if info.field_name not in ForeignFormats.model_fields:
            return value
        if value and value != {"type": "text"}:
            raise fail(f"the field is not supported; use `{cls.FORMAT_FIELD}`, or `grammar`")
        return None
