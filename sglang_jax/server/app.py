"""The application: all routes over one engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from sglang_jax.config import ServerConfig
from sglang_jax.engine.types import EngineClient
from sglang_jax.server import control, management, ollama_models
from sglang_jax.server.anthropic_messages import messages_router
from sglang_jax.server.auth import ApiKeyMiddleware, HeadAsGet, WithoutTrailingSlash
from sglang_jax.server.callers import Callers
from sglang_jax.server.context import ServerContext
from sglang_jax.server.conversation import Conversations
from sglang_jax.server.embeddings import embeddings_router
from sglang_jax.server.errors import install_error_handlers
from sglang_jax.server.file_store import FileStore
from sglang_jax.server.files import UPLOAD_PATH, files_router
from sglang_jax.server.loads import loads_router
from sglang_jax.server.metrics import ServerMetrics, metrics_router
from sglang_jax.server.native import native_router, sessions_router
from sglang_jax.server.ollama_replies import ollama_router
from sglang_jax.server.openai_chat import chat_router
from sglang_jax.server.openai_completions import completions_router
from sglang_jax.server.openapi import DescribedApp
from sglang_jax.server.origins import AllowedOrigins
from sglang_jax.server.parsing import parsing_router
from sglang_jax.server.request_body import BodyLimit
from sglang_jax.server.responses import responses_router
from sglang_jax.server.scores import scores_router
from sglang_jax.server.web_ui import WebPages, web_router


@dataclass(frozen=True, slots=True)
class Service:
    """Work that a server does in addition to answering requests, and its routes.

    - `start`: starts it on the running event loop, with the routes for requests that it makes itself.
    - `stop`: stops it at once, when the server begins to drain; `close`: the same, and waits for its end.
    """

    router: APIRouter
    start: Callable[[ASGIApp], None]
    stop: Callable[[], None]
    close: Callable[[], Awaitable[None]]


def create_context(
    client: EngineClient, config: ServerConfig, callers: Callers | None = None, files: FileStore | None = None
) -> ServerContext:
    """Returns the context of an engine's routes. `callers`: None for those of the options; `files`: None for a server
    without them. Raises `ConfigError`."""
    if callers is None:
        callers = Callers.of(config)
    return ServerContext(client, config, ServerMetrics(client, config.model_name), callers, files)


def create_app(context: ServerContext, service: Service | None = None) -> FastAPI:
    """Returns an ASGI application for the context's engine, to run on the event loop of the engine client."""
    app = create_routes(context, service)
    config = context.config
    app.add_middleware(HeadAsGet)
    app.add_middleware(
        BodyLimit,
        max_body_bytes=config.max_body_bytes,
        client_timeout=config.client_timeout,
        streamed=() if context.files is None else {("POST", UPLOAD_PATH)},
    )
    app.add_middleware(ApiKeyMiddleware, callers=context.callers)  # runs before BodyLimit
    if not config.disable_web_ui:
        app.add_middleware(WebPages)  # runs before the check of keys
    app.add_middleware(AllowedOrigins, origins=config.origins())
    app.add_middleware(WithoutTrailingSlash)  # the last added runs first
    return app


def create_routes(context: ServerContext, service: Service | None = None) -> FastAPI:
    """Returns only the routes, for requests of this process, whose caller is set already."""
    app = DescribedApp(title="sglang-jax", docs_url=None, redoc_url=None, asks_for_a_key=context.callers.asks_for_a_key)
    app.state.long_work = context.long_work
    app.state.max_json_depth = context.config.max_json_depth
    install_error_handlers(app)
    conversations = Conversations(context)
    routers = [
        native_router(context),
        completions_router(context),
        chat_router(context, conversations),
        responses_router(context, conversations),
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
        parsing_router(context, conversations),
        embeddings_router(context),
        scores_router(context),
        metrics_router(context.metrics),
    ]
    if not context.config.disable_web_ui:
        routers.append(web_router(context))
    if context.files is not None:
        routers.append(files_router(context.files, context.config.client_timeout))
    if service is not None:
        routers.append(service.router)
    app.add_routers(routers)
    return app
