"""Outputs as callers in Python see them: with all that was generated so far.

The engine gives deltas. Who wants the whole puts it together here, at the edge, so that nobody else pays for it.
"""

from __future__ import annotations

import uuid
from contextlib import aclosing
from dataclasses import replace

from sglang_jax.engine.so_far import SoFar
from sglang_jax.engine.types import EngineClient, GenerateInput, GenerateOutput, OutputDelta, TokenLogprob


class CumulativeOutputs:
    """The outputs of one request as they stand after each of its deltas. Their indices count from `first_index`."""

    def __init__(self, request_id: str, first_index: int = 0) -> None:
        self._request_id = request_id
        self._first_index = first_index
        self._so_far: dict[int, SoFar] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprob] | None] = {}

    def add(self, delta: OutputDelta) -> GenerateOutput:
        """The output that the delta belongs to. Outputs given earlier stay as they were."""
        index = delta.index
        so_far = self._so_far.get(index)
        if so_far is None:
            so_far = self._so_far[index] = SoFar()
            self._prompt_logprobs[index] = None if delta.prompt_logprobs is None else list(delta.prompt_logprobs)
        output = GenerateOutput.__new__(GenerateOutput)
        output.part_of(so_far.add(delta))
        output.request_id = self._request_id
        output.index = self._first_index + index
        output.delta_text = delta.text
        output.delta_ids = delta.token_ids
        output.prompt_tokens = delta.prompt_tokens
        output.completion_tokens = delta.completion_tokens
        output.cached_tokens = delta.cached_tokens
        output.finish = delta.finish
        output.delta_logprobs = list(delta.logprobs)
        output.prompt_logprobs = self._prompt_logprobs[index]
        output.drafts = delta.drafts
        return output

    def add_good(self, delta: OutputDelta) -> GenerateOutput:
        """`add`; raises the error of an output that failed."""
        if delta.finish is not None and delta.finish.error is not None:
            raise delta.finish.error
        return self.add(delta)


def named(request: GenerateInput) -> tuple[GenerateInput, str]:
    """A request with an id, made up if it has none."""
    if request.request_id is not None:
        return request, request.request_id
    request_id = uuid.uuid4().hex
    return replace(request, request_id=request_id), request_id


async def finished_outputs(client: EngineClient, request: GenerateInput, first_index: int = 0) -> list[GenerateOutput]:
    """The outputs of a request that does not stream, in their order.

    **Raises:** what `client.generate` raises, and the error of an output that failed.
    """
    request, request_id = named(request)
    outputs = CumulativeOutputs(request_id, first_index)
    async with aclosing(client.generate(request)) as deltas:
        finished = [outputs.add_good(delta) async for delta in deltas]
    return sorted(finished, key=lambda output: output.index)
