"""The server as an ASGI application with its own engine, to run in another Python server."""

from __future__ import annotations

from typing import Self

from starlette.types import ASGIApp

from sglang_jax.config import ServerConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_engine
from sglang_jax.errors import EngineDeadError
from sglang_jax.server.app import create_app, create_context
from sglang_jax.server.requests_seen import RequestsSeen


class EmbeddedServer:
    """An engine in a separate process, with all routes of the server.

    >>> server = await EmbeddedServer.start(model_path="demo")
    >>> await server.app(scope, receive, send)
    >>> await server.close()

    `app` runs on the event loop that called `start`. The other server owns the socket, so `host`, `port` and similar
    options do not apply; it also has to drain requests at shutdown.
    """

    def __init__(self, client: AsyncEngineClient, app: ASGIApp) -> None:
        self._client = client
        self.app = app

    @classmethod
    async def start(cls, config: ServerConfig | None = None, **options: object) -> Self:
        """Starts the engine and waits until it serves. `config`, or its fields by name (see `ServerConfig`). Raises
        `ConfigError`, `CheckpointError`; `EngineDeadError` if it failed for another reason."""
        config = config or ServerConfig.model_validate(options)
        client = await launch_engine(config)
        context = create_context(client, config)
        return cls(client, RequestsSeen(create_app(context), context.metrics))

    def check(self) -> None:
        """Raises `EngineDeadError` if the engine has ended. It is not restarted: start a new `EmbeddedServer`."""
        if not self._client.alive:
            raise EngineDeadError("the engine has ended")

    async def close(self) -> None:
        """Ends the engine; requests in flight fail."""
        await self._client.close()
