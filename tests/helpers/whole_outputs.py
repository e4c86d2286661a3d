"""Joins the deltas of a client into whole outputs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from sglang_jax.engine.cumulative import CumulativeOutputs
from sglang_jax.engine.types import EngineClient, GenerateInput, GenerateOutput


async def outputs_of(client: EngineClient, request: GenerateInput) -> AsyncGenerator[GenerateOutput, None]:
    """The outputs after each delta, including those that failed."""
    outputs = CumulativeOutputs(request.request_id or "")
    async with aclosing(client.generate(request)) as deltas:
        async for delta in deltas:
            yield outputs.add(delta)


async def collect(client: EngineClient, request: GenerateInput) -> list[GenerateOutput]:
    """All final outputs."""
    return [output async for output in outputs_of(client, request)]
