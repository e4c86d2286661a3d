"""Outputs for callers in Python, which have everything generated so far. The engine returns deltas; outputs are
assembled only here, so that no other path pays for it."""

from __future__ import annotations

from contextlib import aclosing

from sglang_jax.engine.output_buffer import OutputBuffer
from sglang_jax.engine.types import EngineClient, GenerateInput, GenerateOutput, OutputDelta, TokenLogprob


class CumulativeOutputs:
    """The outputs of one request after each of its deltas. Their indices start at `first_index`."""

    def __init__(self, request_id: str, first_index: int = 0) -> None:
        self._request_id = request_id
        self._first_index = first_index
        self._buffers: dict[int, OutputBuffer] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprob] | None] = {}

    @classmethod
    def of(cls, request: GenerateInput, first_index: int = 0) -> CumulativeOutputs:
        """The outputs of a request that has an id."""
        assert request.request_id is not None
        return cls(request.request_id, first_index)

    def add(self, delta: OutputDelta) -> GenerateOutput:
        """Adds a delta and returns its output. Outputs returned earlier do not change."""
        index = delta.index
        buffer = self._buffers.get(index)
        if buffer is None:
            buffer = self._buffers[index] = OutputBuffer()
            self._prompt_logprobs[index] = None if delta.prompt_logprobs is None else list(delta.prompt_logprobs)
        output = GenerateOutput.__new__(GenerateOutput)
        output.set_prefix(buffer.add(delta))
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
        output.pooled = delta.pooled
        output.drafts = delta.drafts
        return output

    def add_good(self, delta: OutputDelta) -> GenerateOutput:
        """Like `add`, but raises the error of an output that failed."""
        if delta.finish is not None and delta.finish.error is not None:
            raise delta.finish.error
        return self.add(delta)


async def finished_outputs(client: EngineClient, request: GenerateInput, first_index: int = 0) -> list[GenerateOutput]:
    """Returns the outputs, in order, of a request that does not stream and has an id. Raises the error of one that
    failed."""
    outputs = CumulativeOutputs.of(request, first_index)
    async with aclosing(client.generate(request)) as deltas:
        finished = [outputs.add_good(delta) async for delta in deltas]
    return sorted(finished, key=lambda output: output.index)
