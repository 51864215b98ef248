"""`GET /v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class DeviceMeta(BaseModel):
    kind: Literal["cpu", "cuda"]
    name: str | None = Field(description="null if not known")
    compute_capability: str | None = Field(description="Of a GPU, such as 8.9")
    total_bytes: int | None = Field(description="Memory of a GPU, which may be the machine's")


class ModelMeta(BaseModel):
    """Facts of the loaded model, under llama-server's names where it has one."""

    n_ctx: int = Field(description="Context length in tokens that is served")
    n_ctx_train: int = Field(description="Context length in tokens of the training")
    n_params: int
    n_vocab: int
    n_embd: int = Field(description="Length of a token's embedding; 0 if not known")
    n_layer: int
    size: int = Field(description="Size of the weights in bytes")
    architecture: str
    quantization: str
    ftype: str = Field(description="Same as quantization")
    n_expert: int = Field(description="Experts per MoE layer; 0 for a dense model")
    n_expert_used: int = Field(description="Experts per token")
    speculation_method: str = Field(
        description="How drafts are made by default; off also where the model cannot be drafted for"
    )
    speculation_preset: str | None = Field(
        description="exact, balanced or fast: what requests get by default; null where nothing is drafted"
    )
    speculation_limit: str | None = Field(
        description="Why the model cannot be drafted for, or only in part; null if it can"
    )
    devices: list[DeviceMeta] = Field(
        description="What the model runs on: the CPU, or every GPU that it is spread over"
    )


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds at which the server started")
    owned_by: str = "s2moe"
    capabilities: list[Literal["completion", "embedding"]] = Field(
        description="completion = it answers, embedding = it gives embeddings; empty until it is loaded"
    )
    max_model_len: int | None = Field(
        description="Same as meta.n_ctx, under vLLM's name; null until the model is loaded"
    )
    meta: ModelMeta | None = Field(description="null until the model is loaded")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
