"""One call of a route for vectors or scores: its texts at the engine, and its usage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
from fastapi import Response
from numpy.typing import NDArray
from starlette.datastructures import Headers

from sglang_jax.engine.pooling import NO_SAMPLES, pooled_numbers
from sglang_jax.engine.types import GenerateInput, OutputDelta
from sglang_jax.sampling.wants import POOLED, Wants
from sglang_jax.server.callers import current_caller
from sglang_jax.server.context import ENGINE_NAMES, ServerContext, new_id, prompt_ids
from sglang_jax.server.fields import routing_key
from sglang_jax.server.pooling_schema import PooledBody
from sglang_jax.server.token_count import TokenCount

FEW_NUMBERS = 2**16
"""Answers with more numbers are written in a thread."""

Found = list[NDArray[np.float32]]
Prompts = Sequence[str | list[int]]
Finished = TypeVar("Finished")

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class PooledCall:
    """A request to one of these routes. `id`: the client's, or a new one; `field`: of its body, with the texts."""

    context: ServerContext
    body: PooledBody
    headers: Headers
    id: str
    field: str
    tokens: TokenCount

    @classmethod
    def of(cls, context: ServerContext, body: PooledBody, headers: Headers, prefix: str, field: str) -> PooledCall:
        """Raises `ModelNotFoundError`."""
        context.check_model(body.model)
        return cls(context, body, headers, body.rid or new_id(prefix), field, TokenCount(current_caller()))

    async def run(self, prompts: Prompts, wants: Wants = POOLED) -> Found:
        """The vector or the scores of each prompt, float32. Raises `RequestError`."""
        self.context.check_texts(len(prompts), self.field)
        body = self.body
        inputs = [
            GenerateInput(
                prompt=prompt,
                sampling=NO_SAMPLES,
                request_id=engine_id,
                extra_key=body.cache_namespace,
                priority=body.priority or 0,
                routing_key=routing_key(body.routing_key, self.headers),
                wants=wants,
            )
            for prompt, engine_id in zip(prompts, prompt_ids(self.id, len(prompts)), strict=True)
        ]
        return await self.context.collect(self.id, inputs, self._take, {**ENGINE_NAMES, "prompt": self.field})

    async def prepare(self, work: Callable[[], list[list[int]]], size: int, texts: int) -> list[list[int]]:
        """Returns the result of `work`, which tokenizes `texts` prompts of `size` characters, in a thread. Raises
        `ParameterError` for too many texts."""
        self.context.check_texts(texts, self.field)
        return await self.context.render(work, size=size, request_id=self.id)

    def _take(self, outputs: list[list[OutputDelta]]) -> Found:
        found: Found = []
        for number, (output,) in enumerate(outputs):
            self.tokens.add(number, output)
            found.append(pooled_numbers(output))
        return found


async def written(answer: Callable[[], object], numbers: int) -> Response:
    """The response with an answer as JSON, written in a thread if it has many `numbers`."""

    def write() -> bytes:
        return _encoder.encode(answer())

    content = write() if numbers <= FEW_NUMBERS else await asyncio.to_thread(write)
    return Response(content, media_type="application/json")
