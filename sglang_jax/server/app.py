"""The application: all routes over one engine."""

from __future__ import annotations

from fastapi import FastAPI

from sglang_jax.config import ServerConfig
from sglang_jax.engine.types import EngineClient
from sglang_jax.server import control, management, ollama_models
from sglang_jax.server.anthropic_messages import messages_router
from sglang_jax.server.auth import ApiKeyMiddleware, HeadAsGet, WithoutTrailingSlash
from sglang_jax.server.callers import Callers
from sglang_jax.server.context import ServerContext
from sglang_jax.server.conversation import Conversations
from sglang_jax.server.errors import install_error_handlers
from sglang_jax.server.json_body import LongWork
from sglang_jax.server.loads import loads_router
from sglang_jax.server.metrics import ServerMetrics, metrics_router
from sglang_jax.server.native import native_router, sessions_router
from sglang_jax.server.ollama_replies import ollama_router
from sglang_jax.server.openai_chat import chat_router
from sglang_jax.server.openai_completions import completions_router
from sglang_jax.server.openapi import DescribedApp
from sglang_jax.server.origins import AllowedOrigins
from sglang_jax.server.request_body import BodyLimit


def create_context(client: EngineClient, config: ServerConfig, callers: Callers | None = None) -> ServerContext:
    """Returns the context of an engine's routes. `callers`: None for those of the options. Raises `ConfigError`."""
    if callers is None:
        callers = Callers.of(config)
    return ServerContext(client, config, ServerMetrics(client, config.model_name), callers)


def create_app(context: ServerContext) -> FastAPI:
    """Returns an ASGI application for the context's engine, to run on the event loop of the engine client."""
    app = DescribedApp(title="sglang-jax", docs_url=None, redoc_url=None, asks_for_a_key=context.callers.asks_for_a_key)
    app.state.long_work = LongWork()
    app.state.max_json_depth = context.config.max_json_depth
    install_error_handlers(app)
    conversations = Conversations(context)
    routers = (
        native_router(context),
        completions_router(context),
        chat_router(context, conversations),
        messages_router(context, conversations),
        ollama_router(context, conversations),
        ollama_models.models_router(context, conversations),
        sessions_router(context),
        management.models_router(context),
        management.health_router(context),
        management.information_router(context),
        loads_router(context.client),
        control.control_router(context),
        management.tokenizer_router(context),
        metrics_router(context.metrics),
    )
    app.add_routers(routers)
    config = context.config
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyLimit, max_body_bytes=config.max_body_bytes, client_timeout=config.client_timeout)
    app.add_middleware(ApiKeyMiddleware, callers=context.callers)  # runs before BodyLimit
    app.add_middleware(AllowedOrigins, origins=config.origins())
    app.add_middleware(WithoutTrailingSlash)  # the last added runs first
    return app
