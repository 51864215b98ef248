"""`GET /props`: what is served, and how. Names are llama-server's where it has one."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from s2moe.server.schema.models import ModelMeta


class SamplingParams(BaseModel):
    """What a request gets that does not say otherwise."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    repeat_last_n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None = Field(description="null = a random one for each request")


class GenerationSettings(BaseModel):
    n_ctx: int = Field(description="tokens of prompt and answer together")
    params: SamplingParams


class Modalities(BaseModel):
    vision: bool
    audio: bool
    video: bool


class MemoryPlan(BaseModel):
    """How the memory budget was divided when the engine started."""

    budget_bytes: int
    budget_source: str = Field(description="what set the budget")
    floor_bytes: int = Field(description="the least budget that this configuration can be served with")
    pools: dict[str, int] = Field(description="bytes by purpose; they add up to what is used of the budget")
    n_experts: int = Field(description="experts of all layers; 0 for a dense model")
    n_slots: int = Field(description="experts that fit into the expert cache")
    n_cycle_slots: int = Field(description="experts that one token uses")
    lines: list[str] = Field(description="the plan in words")
    warnings: list[str]


class Props(BaseModel):
    default_generation_settings: GenerationSettings
    total_slots: int = Field(description="requests that are answered at a time")
    model_alias: str
    model_path: str | None = Field(description="name of the model file, without its folder; null = the demo")
    model: ModelMeta
    modalities: Modalities = Field(description="what besides text may be in messages")
    chat_template: str = Field(description="Jinja source in use")
    bos_token: str
    eos_token: str
    build_info: str = Field(description="build of llama.cpp and of its patches")
    version: str = Field(description="version of s2moe")
    is_sleeping: bool
    plan: MemoryPlan | None = Field(description="null where nothing was planned")
    settings: dict[str, Any] = Field(
        description="of the server, as given or by default; files by their names, and no API key"
    )
