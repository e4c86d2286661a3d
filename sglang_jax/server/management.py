"""Routes for health, information, the served model and tokenization."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from sglang_jax.about import version
from sglang_jax.engine.pooling import NO_SAMPLES
from sglang_jax.engine.types import EngineClient, GenerateInput, ReplicaLoad, ReplicaState
from sglang_jax.engine.validation import check_repeated
from sglang_jax.errors import ParameterError, PromptTooLongError, RequestError
from sglang_jax.sampling import SamplingParams
from sglang_jax.sampling.wants import POOLED
from sglang_jax.scheduler.commands import GetCacheReport, GetCacheSummary, GetState
from sglang_jax.server.context import ServerContext, new_id
from sglang_jax.server.control import OPERATORS_ONLY
from sglang_jax.server.errors import ShuttingDownError, UnavailableError
from sglang_jax.server.fields import Body, OneOrMany, TokenIds, as_list
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.openapi import Detokenized, ModelCard, ModelList, Tokenized, TokenizerInfo, answers
from sglang_jax.server.streaming import json_response, until_disconnect

HEALTH_SECONDS = 20.0
"""Seconds that `/health_generate` waits for its token."""

TOKENIZED_CONTEXTS = 8
"""Maximum tokens of a text for `/tokenize`, in context lengths: each takes some hundred bytes during tokenization, and
each character may be a token."""

MAX_TOKENIZED = 2**21
"""Maximum tokens of an answer of `/tokenize`."""

DETOKENIZED = 2**18
"""Token ids that `/detokenize` accepts, or `TOKENIZED_CONTEXTS` if more. Each takes 40 bytes or more until it is
text."""


class TokenizeBody(Body):
    """`POST /tokenize`."""

    model: str | None = None
    prompt: OneOrMany[str]
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None


def health_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    def check() -> None:
        if not context.client.alive:
            raise UnavailableError(_why_not_alive(context.client.loads()))
        if context.draining:
            raise ShuttingDownError("the server is shutting down")

    @router.get("/livez")
    @router.head("/livez", include_in_schema=False)
    async def livez() -> dict[str, str]:
        """200 while an engine serves or is being restarted; 503 means that the server must be restarted."""
        if context.client.gone:
            raise UnavailableError(_why_not_alive(context.client.loads()))
        return {"status": "ok"}

    @router.get("/readyz")
    @router.head("/readyz", include_in_schema=False)
    async def readyz() -> dict[str, str | int]:
        """200 while an engine serves and new requests are accepted, otherwise 503. `programs_left` are still compiled
        in the background, over all replicas; until then larger ones run, and steps take longer."""
        check()
        return {"status": "ok", "programs_left": sum(load.stats.programs_left for load in context.client.loads())}

    @router.get("/health")
    @router.head("/health", include_in_schema=False)
    async def health() -> dict[str, str]:
        """200 while an engine serves and new requests are accepted, otherwise 503."""
        check()
        return {"status": "ok"}

    @router.get("/health_generate")
    async def health_generate() -> dict[str, str]:
        """200 if the engine generates one token, or a vector, within 20 seconds, otherwise 503."""
        check()
        prompt = GenerateInput(
            prompt=[context.client.model_info.bos_token_id or 0],
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            request_id=new_id("health"),
        )
        if context.client.model_info.pooler is not None:
            prompt = replace(prompt, sampling=NO_SAMPLES, wants=POOLED)
        try:
            await asyncio.wait_for(context.collect(prompt.request_id or "", [prompt], len), HEALTH_SECONDS)
        except TimeoutError as error:
            raise UnavailableError(f"the engine generated no token within {HEALTH_SECONDS:g} s") from error
        except RequestError as error:
            raise UnavailableError(f"the engine cannot generate: {error.message}", code=error.code) from error
        return {"status": "ok"}

    return router


def _why_not_alive(loads: list[ReplicaLoad]) -> str:
    if len(loads) == 1 and not loads[0].address:
        reason = f" ({loads[0].last_end})" if loads[0].last_end else ""
        if loads[0].state is ReplicaState.STOPPED:
            return f"the engine has ended{reason}; restart the server"
        return f"the engine is being restarted{reason}; try again later"
    return "no replica serves: " + ", ".join(f"{load.index} is {load.state}" for load in loads)


def _weight_version(client: EngineClient) -> str:
    """The version of the weights of all replicas that serve; empty if they differ."""
    versions = {load.stats.weight_version for load in client.loads() if load.state is ReplicaState.SERVING}
    return "" if len(versions) > 1 else next(iter(versions), client.model_info.weight_version)


def information_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    config = context.config

    @router.get("/", include_in_schema=False)
    async def start() -> dict[str, str]:
        """A welcome page for browsers."""
        return {
            "server": f"sglang-jax {version()}",
            "model": config.model_name,
            "chat": "POST /v1/chat/completions",
            "routes": "GET /docs",
            "ready": "GET /readyz",
        }

    @router.get("/version")
    async def show_version() -> dict[str, str]:
        """The server's version."""
        return {"version": version()}

    @router.get("/load", dependencies=OPERATORS_ONLY)
    async def load() -> dict[str, int]:
        """The number of requests in flight that generate, in vLLM's format."""
        return {"server_load": len(context.in_flight)}

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> dict[str, Any]:
        """The model's properties."""
        info = asdict(context.client.model_info)
        return {
            **info,
            "weight_version": _weight_version(context.client),
            "served_model_name": config.model_name,
            "tokenizer_path": config.tokenizer_path or config.model_path,
            "is_generation": context.client.model_info.pooler is None,
        }

    @router.get("/get_weight_version")
    @router.get("/weight_info")
    @router.get("/weight_version")
    async def weight_version() -> dict[str, str]:
        """The name of the weights, as in `/model_info`."""
        return {"weight_version": _weight_version(context.client)}

    @router.get("/cache_report", dependencies=OPERATORS_ONLY)
    async def cache_report() -> Response:
        """Contents of each replica's prefix cache: pools, the largest and most used nodes of the tree, sessions."""
        return json_response({"replicas": await context.client.call(GetCacheReport())})

    @router.get("/cache_summary", dependencies=OPERATORS_ONLY)
    async def cache_summary() -> Response:
        """Pools of each replica's prefix cache, and the most used nodes of its tree; cheap enough to be polled."""
        return json_response({"replicas": await context.client.call(GetCacheSummary())})

    @router.get("/get_server_info", dependencies=OPERATORS_ONLY)
    @router.get("/server_info", dependencies=OPERATORS_ONLY)
    async def server_info() -> dict[str, Any]:
        """All options except API keys, and the state of scheduler and runner."""
        states = await context.client.call(GetState())
        options = config.model_dump(mode="json", exclude={"api_key", "admin_api_key"})
        return {**options, "version": version(), "internal_states": states}

    return router


def tokenizer_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    @answers(Tokenized)
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """Tokenizes one text or several."""
        context.check_model(body.model)
        context_length = context.client.model_info.context_length
        texts = as_list(body.prompt)
        context.check_texts(len(texts), "prompt")
        work = _tokenized(context, texts, special=body.add_special_tokens is not False)
        written, counts = await until_disconnect(request.receive, work)
        single = isinstance(body.prompt, str)
        return json_response(
            {
                "tokens": written[0] if single else written,
                "count": counts[0] if single else counts,
                "max_model_len": context_length,
            }
        )

    @router.post("/detokenize")
    @answers(Detokenized)
    def detokenize(body: DetokenizeBody) -> Response:
        """Converts one list of token ids, or several, to text. Runs in a worker thread."""
        context.check_model(body.model)
        skip = body.skip_special_tokens is not False
        nested = [ids for ids in body.tokens if isinstance(ids, list)]
        lists = nested or [[token for token in body.tokens if isinstance(token, int)]]
        vocab_size, count = context.client.model_info.vocab_size, sum(map(len, lists))
        most = max(DETOKENIZED, TOKENIZED_CONTEXTS * context.client.model_info.context_length)
        if count > most:
            raise ParameterError(
                f"tokens holds {count} ids, the limit of one request is {most}; send them in several", param="tokens"
            )
        for token in (token for ids in lists for token in ids):
            if not 0 <= token < vocab_size:
                raise ParameterError(
                    f"tokens holds {token}, the vocabulary goes from 0 to {vocab_size - 1}", param="tokens"
                )
        tokenizer = context.client.tokenizer
        check_repeated([(ids, 1) for ids in lists], tokenizer, "tokens")
        texts = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in lists]
        return json_response({"text": texts} if nested else {"text": texts[0], "prompt": texts[0]})

    @router.get("/tokenizer_info")
    @answers(TokenizerInfo)
    def tokenizer_info() -> Response:
        """Special tokens and chat template, for clients that tokenize with this server."""
        return json_response(_tokenizer_info(context.client))

    return router


def _tokenizer_info(client: EngineClient) -> dict[str, object]:
    """Returns special tokens by transformers' names, like vLLM: the tokenizer's, else the model's, else null."""
    tokenizer, model = client.tokenizer, client.model_info
    own: dict[str, str | None] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
    if model.bos_token_id is not None:
        own["bos_token"] = tokenizer.token_text(model.bos_token_id)
    if model.eos_token_ids:
        own["eos_token"] = tokenizer.token_text(model.eos_token_ids[0])
    try:
        template = tokenizer.chat_template or None
    except RequestError:  # several templates, but not one for chats
        template = None
    return {**own, **tokenizer.role_tokens, "chat_template": template, "model_max_length": model.context_length}


async def _tokenized(context: ServerContext, texts: list[str], *, special: bool) -> tuple[list[msgspec.Raw], list[int]]:
    """Returns the ids of each text as JSON, and their numbers. Raises `PromptTooLongError`."""
    max_tokens = TOKENIZED_CONTEXTS * context.client.model_info.context_length
    written: list[msgspec.Raw] = []
    counts: list[int] = []
    total, request_id = 0, new_id("tokenize")
    for text in texts:
        ids = await context.encode(text, request_id, add_special_tokens=special, max_tokens=max_tokens, param="prompt")
        written.append(msgspec.Raw(msgspec.json.encode(ids)))  # a tenth of the list's memory
        counts.append(len(ids))
        total += len(ids)
        if total > MAX_TOKENIZED:
            raise PromptTooLongError(
                f"prompt has more than {MAX_TOKENIZED} tokens, the limit per request", param="prompt"
            )
        await asyncio.sleep(0)
    return written, counts


def models_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    cards: dict[str, dict[str, object]] = {
        name: {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang-jax",
            "root": context.client.model_info.model_path,
            "parent": None,
            "max_model_len": context.client.model_info.context_length,
        }
        for name in context.config.model_names
    }

    @router.get("/v1/models")
    @answers(ModelList)
    async def models() -> dict[str, object]:
        """Lists the served model, by each of its names."""
        return {"object": "list", "data": list(cards.values())}

    @router.get("/v1/models/{model:path}")
    @answers(ModelCard)
    async def model(model: str) -> dict[str, object]:
        """The served model's entry."""
        context.check_model(model)
        return cards.get(model, cards[context.config.model_name])

    return router
