"""Routes of Ollama's API that describe the served model. It cannot be changed over them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter, Response

from sglang_jax.about import version
from sglang_jax.errors import ParameterError, RequestError
from sglang_jax.server.context import ServerContext
from sglang_jax.server.conversation import Conversations
from sglang_jax.server.fields import Body
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.ollama_schema import LATEST, OPTION_NAMES
from sglang_jax.server.openapi import answers
from sglang_jax.server.streaming import json_response

FOLLOWED_VERSION = "0.12.11"
"""The version of Ollama whose API these routes follow; clients refuse to work with older ones."""

NEVER = "9999-12-31T23:59:59Z"
"""When the model will be unloaded."""


class OllamaDetails(msgspec.Struct, kw_only=True):
    """What a model is. `quantization_level`: the dtype of activations; what this server does not know is empty."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """The served model. `digest`: of its name and its path, not of its files; `size`: 0, not known."""

    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: OllamaDetails


class OllamaModels(msgspec.Struct):
    """The only model."""

    models: list[OllamaModel]


class OllamaRunning(msgspec.Struct, kw_only=True):
    """The served model in memory. `expires_at`: never; `size`, `size_vram`: 0, not known."""

    name: str
    model: str
    size: int = 0
    digest: str
    details: OllamaDetails
    expires_at: str = NEVER
    size_vram: int = 0
    context_length: int


class OllamaRunningModels(msgspec.Struct):
    """The only model."""

    models: list[OllamaRunning]


class OllamaShown(msgspec.Struct, kw_only=True):
    """The served model. `parameters`: its sampling defaults, one a line; `template`: its chat template, in Jinja;
    `capabilities`: `completion`, `tools` if it can call them, `thinking` if that is separated from its replies; only
    `embedding` if it gives vectors; none if it gives labels."""

    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, kw_only=True):
    """`version`: of Ollama, whose API is followed; `server`: this server's name and version."""

    version: str
    server: str


class OllamaShowBody(Body):
    """`POST /api/show`. `name`: the former name of `model`."""

    passes_unknown_fields: ClassVar[bool] = True

    model: str | None = None
    name: str | None = None


def models_router(context: ServerContext, conversations: Conversations) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, strict_content_type=False)
    name, info = context.config.model_name, context.client.model_info
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    digest = hashlib.sha256(f"{name}\n{info.model_path}".encode()).hexdigest()
    details = OllamaDetails(
        format="gguf" if info.model_path.endswith(".gguf") else "",
        family=info.architecture,
        families=[info.architecture],
        quantization_level=info.dtype,
    )

    @router.get("/api/tags")
    @answers(OllamaModels)
    async def tags() -> Response:
        """Lists the served model in the format of Ollama's API."""
        model = OllamaModel(name=name, model=name, modified_at=started, digest=digest, details=details)
        return json_response(OllamaModels([model]))

    @router.get("/api/ps")
    @answers(OllamaRunningModels)
    async def running() -> Response:
        """Lists the models in memory: the served one."""
        model = OllamaRunning(name=name, model=name, digest=digest, details=details, context_length=info.context_length)
        return json_response(OllamaRunningModels([model]))

    @router.post("/api/show")
    @answers(OllamaShown)
    def show(body: OllamaShowBody) -> Response:
        """Describes the served model. Runs in a worker thread, because it may read the chat template."""
        asked = body.model or body.name
        if asked is None:
            raise ParameterError("model is required", param="model", code="missing_field")
        context.check_model(asked.removesuffix(LATEST))
        family = info.architecture
        template, capabilities = _abilities(context, conversations)
        shown = OllamaShown(
            parameters=_parameters(context),
            template=template,
            details=details,
            model_info={
                "general.architecture": family,
                "general.basename": name,
                f"{family}.context_length": info.context_length,
                f"{family}.vocab_size": info.vocab_size,
                "tokenizer.ggml.bos_token_id": info.bos_token_id,
                "tokenizer.ggml.eos_token_ids": info.eos_token_ids,
            },
            capabilities=capabilities,
            modified_at=started,
        )
        return json_response(shown)

    @router.get("/api/version")
    @answers(OllamaVersion)
    async def api_version() -> Response:
        """The version of Ollama whose API is followed, and this server's."""
        return json_response(OllamaVersion(version=FOLLOWED_VERSION, server=f"sglang-jax {version()}"))

    return router


def _abilities(context: ServerContext, conversations: Conversations) -> tuple[str, list[str]]:
    """Returns the chat template, empty if there is none, and what the model can do."""
    pooler = context.client.model_info.pooler
    if pooler is not None:
        return "", [] if pooler.labels else ["embedding"]
    capabilities = ["completion"]
    try:
        template = context.client.tokenizer.chat_template
    except RequestError:  # several templates, but not one for chats
        return "", capabilities
    if template and conversations.formats.family is not None:
        capabilities.append("tools")
    if template and conversations.formats.reasoning is not None:
        capabilities.append("thinking")
    return template, capabilities


def _parameters(context: ServerContext) -> str:
    """Returns the sampling defaults by this API's names."""
    values = context.generation_defaults.recommended()
    return "\n".join(f"{OPTION_NAMES[name]:30} {value:g}" for name, value in values.items())
