"""`GET /health`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Health(BaseModel):
    status: Literal["ok", "loading", "restarting", "draining", "dead"]
    reason: str | None = Field(None, description="Why the server is not ready")
