"""Outputs as callers in Python see them: with all that was generated so far.

The engine gives deltas. Who wants the whole puts it together here, at the edge, so that nobody else pays for it.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from sglang_jax.engine.types import EngineClient, GenerateInput, GenerateOutput, OutputDelta


class CumulativeOutputs:
    """The outputs of one request as they stand after each of its deltas. Their indices count from `first_index`."""

    def __init__(self, request_id: str, first_index: int = 0) -> None:
        self._request_id = request_id
        self._first_index = first_index
        self._latest: dict[int, GenerateOutput] = {}

    def add(self, delta: OutputDelta) -> GenerateOutput:
        """The output that the delta belongs to. Outputs given earlier stay as they were."""
        before = self._latest.get(delta.index)
        output = self._latest[delta.index] = GenerateOutput(
            request_id=self._request_id,
            index=self._first_index + delta.index,
            text=before.text + delta.text if before else delta.text,
            delta_text=delta.text,
            output_ids=before.output_ids + delta.token_ids if before else delta.token_ids,
            delta_ids=delta.token_ids,
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=delta.completion_tokens,
            cached_tokens=delta.cached_tokens,
            finish=delta.finish,
            logprobs=before.logprobs + delta.logprobs if before else delta.logprobs,
            delta_logprobs=delta.logprobs,
            prompt_logprobs=before.prompt_logprobs if before else delta.prompt_logprobs,
            drafts=delta.drafts,
        )
        return output


async def cumulative_outputs(
    client: EngineClient, request: GenerateInput, first_index: int = 0
) -> AsyncGenerator[GenerateOutput, None]:
    """What `client.generate` gives, put together. Raises what that raises, and the error of an output that failed."""
    if request.request_id is None:
        request = replace(request, request_id=uuid.uuid4().hex)
    outputs = CumulativeOutputs(request.request_id or "", first_index)
    async with aclosing(client.generate(request)) as deltas:
        async for delta in deltas:
            if delta.finish is not None and delta.finish.error is not None:
                raise delta.finish.error
            yield outputs.add(delta)
