"""`/v1/models`."""

from __future__ import annotations

import time

from fastapi import APIRouter

from sglang_jax.server.context import ServerContext


def models_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    card: dict[str, object] = {
        "id": context.config.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang-jax",
        "root": context.client.model_info.model_path,
        "parent": None,
        "max_model_len": context.client.model_info.context_length,
    }

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        """Lists the served model."""
        return {"object": "list", "data": [card]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, object]:
        """The served model's entry."""
        context.check_model(model)
        return card

    return router
