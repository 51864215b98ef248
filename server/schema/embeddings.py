"""`POST /v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from s2moe.server.schema.prompts import Prompt, PromptForms, read_prompts
from s2moe.server.schema.sampling import fail

MAX_INPUTS = 2048


def _read_inputs(value: object) -> list[Prompt]:
    inputs = read_prompts(value)
    if len(inputs) > MAX_INPUTS:
        raise fail(f"at most {MAX_INPUTS} texts are allowed; send several requests")
    return inputs


class EmbeddingsRequest(BaseModel):
    """Body of a request for embeddings."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    input: Annotated[list[Prompt], PlainValidator(_read_inputs, json_schema_input_type=PromptForms)] = Field(
        description=f"text or its tokens, or a list of up to {MAX_INPUTS} of them; each gives one vector"
    )
    model: str | None = Field(
        None, description="any name is served by the loaded model, unless the server runs with --strict-model"
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 = of little-endian 32-bit floats (default: float)"
    )
    dimensions: int | None = Field(
        None, ge=1, description="only the length that the model's vectors have: they cannot be shortened"
    )


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int = Field(description="of the input")
    embedding: list[float] | str = Field(description="vector of length 1, or base64 text")


class EmbeddingsUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
