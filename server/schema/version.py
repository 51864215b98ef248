"""`GET /version`."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Version(BaseModel):
    version: str = Field(description="Version of s2moe")
    system_fingerprint: str | None = Field(
        None, description="Build of llama.cpp and of its patches; null until the engine has reported it"
    )
