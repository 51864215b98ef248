"""`GET /props`: settings, memory plan and model, answered without the engine."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter
from pydantic import SecretStr

from s2moe.engine.messages import ModelInfo, Plan
from s2moe.server.api.models import meta_of
from s2moe.server.engine_client import EngineClient
from s2moe.server.errors import unavailable
from s2moe.server.schema.error import error_responses
from s2moe.server.schema.props import GenerationSettings, MemoryPlan, Modalities, Props, SamplingParams
from s2moe.server.settings import Settings

_HIDDEN: Final = frozenset({"api_key", "api_key_file"})


def router(settings: Settings, client: EngineClient) -> APIRouter:
    routes = APIRouter()
    shown_settings = public_settings(settings)

    async def get_props() -> Props:
        model = client.model
        if model is None:
            raise unavailable(client.state, client.state_detail)
        return Props(
            default_generation_settings=GenerationSettings(n_ctx=model.n_ctx, params=_params(model)),
            total_slots=1,
            model_alias=settings.model_alias,
            model_path=None if settings.model is None else settings.model.name,
            model=meta_of(model),
            modalities=Modalities(vision=False, audio=False, video=False),
            chat_template=model.chat_template,
            bos_token=model.bos_token,
            eos_token=model.eos_token,
            build_info=model.system_fingerprint,
            version=version("s2moe"),
            is_sleeping=False,
            plan=None if client.plan is None else _plan(client.plan),
            settings=shown_settings,
        )

    for path, shown in (("/props", True), ("/v1/props", False)):
        routes.add_api_route(
            path,
            get_props,
            methods=["GET"],
            summary="Settings, memory plan and model",
            responses=error_responses(401, 503),
            include_in_schema=shown,
        )
    return routes


def public_settings(settings: Settings) -> dict[str, Any]:
    """Every setting but secrets; of a path its last part, since folders tell of the machine and its users."""
    return {
        name: _public(value)
        for name in type(settings).model_fields
        if name not in _HIDDEN and not isinstance(value := getattr(settings, name), SecretStr)
    }


def _public(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    return list(value) if isinstance(value, tuple) else value


def _params(model: ModelInfo) -> SamplingParams:
    sampling = model.default_sampling
    return SamplingParams(**{name: getattr(sampling, name) for name in SamplingParams.model_fields})


def _plan(plan: Plan) -> MemoryPlan:
    return MemoryPlan(
        budget_bytes=plan.budget_bytes,
        budget_source=plan.budget_source,
        floor_bytes=plan.floor_bytes,
        pools={pool.pool: pool.budget_bytes for pool in plan.pools},
        n_experts=plan.n_experts,
        n_slots=plan.n_slots,
        n_cycle_slots=plan.n_cycle_slots,
        lines=plan.lines,
        warnings=plan.warnings,
    )
