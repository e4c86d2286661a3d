"""`POST /open_session`, `POST /close_session`: conversations whose turns send only new text or tokens, as in SGLang."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from sglang_jax.engine.validation import new_session
from sglang_jax.scheduler.commands import CloseSession
from sglang_jax.server.callers import current_caller
from sglang_jax.server.context import ServerContext
from sglang_jax.server.errors import ShuttingDownError
from sglang_jax.server.fields import Body, ShortText, tenant_of
from sglang_jax.server.json_body import JsonRoute


class OpenSessionBody(Body):
    """`capacity_of_str_len`: ignored, because the context length bounds a session. `timeout`: seconds without a turn
    after which it is closed."""

    capacity_of_str_len: Annotated[int, Field(ge=0)] = 0
    session_id: ShortText | None = None
    streaming: bool | None = None
    timeout: float | None = None


class CloseSessionBody(Body):
    session_id: ShortText


def sessions_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/open_session")
    async def open_session(body: OpenSessionBody, request: Request) -> str:
        """Opens a session for this API key; returns its id as a JSON string."""
        if context.draining:
            raise ShuttingDownError("the server is shutting down and opens no new sessions")
        owner = current_caller().tenant(tenant_of(request.headers))
        command = new_session(body.session_id, owner, streaming=bool(body.streaming), timeout=body.timeout)
        return await context.client.call(command)

    @router.post("/close_session")
    async def close_session(body: CloseSessionBody, request: Request) -> dict[str, object]:
        """Closes a session of this API key; a running turn still finishes. Its KV in memory becomes an ordinary cached
        prefix."""
        owner = current_caller().tenant(tenant_of(request.headers))
        await context.client.call(CloseSession(body.session_id, owner))
        return {"success": True}

    return router
