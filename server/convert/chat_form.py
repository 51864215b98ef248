"""A chat request that was made of another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from s2moe.server.convert.field_names import FieldNames
from s2moe.server.errors import InvalidRequestError, from_validation
from s2moe.server.schema.chat import ChatRequest
from s2moe.server.schema.sampling import SamplingFields


@dataclass(frozen=True)
class ChatForm:
    """What a request of another protocol says, in chat's words."""

    fields: Mapping[str, Any]
    """Body of a chat request; None = absent."""
    names: FieldNames
    skipped_tools: tuple[str, ...] = ()
    """Types of tools that were left out, since this server cannot run them."""

    def request(self) -> ChatRequest:
        """Raises InvalidRequestError that names the client's field."""
        if not self.fields.get("messages"):
            message = "Invalid value for `messages`: nothing in it is for the model; add a message with text."
            raise self.names.translate(InvalidRequestError(message, param="messages"))
        try:
            return ChatRequest.model_validate({k: v for k, v in self.fields.items() if v is not None})
        except ValidationError as error:
            problem = from_validation(error.errors(include_url=False, include_input=False))
            raise self.names.translate(problem) from None


def sampling_of(body: SamplingFields) -> dict[str, Any]:
    """The fields that all generating endpoints share, as a chat request has them."""
    fields = {name: getattr(body, name) for name in SamplingFields.model_fields}
    if body.logit_bias is not None:
        fields["logit_bias"] = {str(token): bias for token, bias in body.logit_bias.items()}
    return fields
