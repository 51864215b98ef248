"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

import time

from fastapi import APIRouter

from s2moe.engine.messages import ModelInfo, ServingDevice
from s2moe.server.engine_client import EngineClient
from s2moe.server.errors import NotFoundError
from s2moe.server.schema.error import error_responses
from s2moe.server.schema.models import DeviceMeta, ModelCard, ModelList, ModelMeta


def router(client: EngineClient, *, alias: str) -> APIRouter:
    routes = APIRouter()
    created = int(time.time())

    def card() -> ModelCard:
        model = client.model
        if model is None:
            return ModelCard(id=alias, created=created, capabilities=[], max_model_len=None, meta=None)
        return ModelCard(
            id=alias,
            created=created,
            capabilities=["embedding"] if model.gives_embeddings else ["completion"],
            max_model_len=model.n_ctx,
            meta=meta_of(model),
        )

    async def list_models() -> ModelList:
        return ModelList(data=[card()])

    async def get_model(model_id: str) -> ModelCard:
        # Chat serves any name, but only one model is here to be described.
        if model_id != alias:
            raise NotFoundError(
                f"The model `{model_id[:64]}` is not served here; this server has `{alias}`.",
                code="model_not_found",
                param="model",
            )
        return card()

    for prefix, shown in (("/v1", True), ("", False)):
        routes.add_api_route(
            f"{prefix}/models",
            list_models,
            methods=["GET"],
            summary="The served model, as a list",
            responses=error_responses(401),
            include_in_schema=shown,
        )
        routes.add_api_route(
            f"{prefix}/models/{{model_id:path}}",
            get_model,
            methods=["GET"],
            summary="The served model",
            responses=error_responses(401, 404),
            include_in_schema=shown,
        )
    return routes


def meta_of(model: ModelInfo) -> ModelMeta:
    return ModelMeta(
        n_ctx=model.n_ctx,
        n_ctx_train=model.n_ctx_train,
        n_params=model.n_params,
        n_vocab=model.n_vocab,
        n_embd=model.n_embd,
        n_layer=model.n_layer,
        size=model.size_bytes,
        architecture=model.architecture,
        quantization=model.quantization,
        ftype=model.quantization,
        n_expert=model.n_expert,
        n_expert_used=model.n_expert_used,
        speculation_method=model.speculation_method,
        speculation_preset=model.speculation_preset or None,
        speculation_limit=model.speculation_limit or None,
        devices=[_device_meta(device) for device in model.devices],
    )


def _device_meta(device: ServingDevice) -> DeviceMeta:
    return DeviceMeta(
        kind="cuda" if device.kind == "cuda" else "cpu",
        name=device.name or None,
        compute_capability=device.compute_capability or None,
        total_bytes=device.total_bytes or None,
    )
