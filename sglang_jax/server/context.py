"""What all routes share: the engine, the options, the figures, and which requests are in flight."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from sglang_jax.config import ServerConfig
from sglang_jax.engine.types import EngineClient, GenerateInput, GenerateOutput
from sglang_jax.errors import ModelNotFoundError, ParameterError
from sglang_jax.sampling import GenerationDefaults
from sglang_jax.server.errors import ShuttingDownError
from sglang_jax.server.metrics import ServerMetrics
from sglang_jax.server.sampling import renamed_fields

ANY_MODEL = "default"
"""The model name of clients that do not care."""

ENGINE_NAMES = {"request_id": "rid"}
"""The engine's names of fields, and what clients call them on every route."""


@dataclass(slots=True)
class ServerContext:
    """One engine behind HTTP.

    - `draining`: the server was told to stop; what is in flight finishes, nothing new starts.
    - `in_flight`: HTTP requests that generate, by id, each with the ids of its prompts in the engine; `in_engine` has
      those of all prompts.
    """

    client: EngineClient
    config: ServerConfig
    metrics: ServerMetrics
    draining: bool = False
    in_flight: dict[str, tuple[str, ...]] = field(default_factory=dict)
    in_engine: set[str] = field(default_factory=set)

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """What sampling fields are that a request leaves out."""
        return self.client.model_info.generation_defaults

    def check_model(self, model: str | None) -> None:
        """Raises `ModelNotFoundError` for a name that is not the served model's."""
        if model not in (None, ANY_MODEL, self.config.model_name):
            raise ModelNotFoundError(
                f"the model {model!r} is not served here; this server has {self.config.model_name!r}", param="model"
            )

    async def generate(
        self, request_id: str, prompts: Sequence[GenerateInput], field_names: Mapping[str, str] = ENGINE_NAMES
    ) -> AsyncGenerator[tuple[int, GenerateOutput], None]:
        """Outputs of all prompts of one HTTP request, each with the number of its prompt. Closing it early aborts them.

        **Arguments:** `prompts`: have their `request_id` set; `field_names`: what the route calls the engine's fields.

        **Raises:** `RequestError` as soon as one prompt fails; the others are aborted.
        """
        self._enter(request_id, prompts)
        try:
            with renamed_fields(field_names):
                streams = [self._observed(prompt) for prompt in prompts]
                async with aclosing(merge(streams)) as outputs:
                    async for item in outputs:
                        yield item
        finally:
            self.in_engine.difference_update(self.in_flight.pop(request_id))

    async def collect(
        self, request_id: str, prompts: Sequence[GenerateInput], field_names: Mapping[str, str] = ENGINE_NAMES
    ) -> list[list[GenerateOutput]]:
        """The finished outputs of each prompt, by index. Raises `RequestError`."""
        outputs: list[list[GenerateOutput]] = [[] for _ in prompts]
        async with aclosing(self.generate(request_id, prompts, field_names)) as items:
            async for number, output in items:
                outputs[number].append(output)
        return [sorted(finished, key=lambda output: output.index) for finished in outputs]

    def abort(self, request_id: str) -> None:
        """Ends the HTTP request with this id, or the one prompt that has it; unknown ids are ignored."""
        for engine_id in self.in_flight.get(request_id, (request_id,)):
            self.client.abort(engine_id)

    def _enter(self, request_id: str, prompts: Sequence[GenerateInput]) -> None:
        if self.draining:
            raise ShuttingDownError("the server is shutting down and takes no new requests")
        ids = tuple(prompt.request_id or "" for prompt in prompts)
        taken = [name for name in {request_id, *ids} if name in self.in_flight or name in self.in_engine]
        if taken or len(set(ids)) < len(ids):
            which = repr(taken[0]) if taken else "one that is given twice"
            raise ParameterError(f"rid must be unique among the requests in flight, got {which}", param="rid")
        self.in_flight[request_id] = ids
        self.in_engine.update(ids)

    async def _observed(self, prompt: GenerateInput) -> AsyncGenerator[GenerateOutput, None]:
        with self.metrics.request(stream=prompt.stream) as timing:
            async with aclosing(self.client.generate(prompt)) as outputs:
                async for output in outputs:
                    if output.finish is not None and output.finish.error is not None:
                        raise output.finish.error
                    timing.output(output.index, len(output.delta_ids), ended=output.finish is not None)
                    yield output


async def merge(
    streams: Sequence[AsyncGenerator[GenerateOutput, None]],
) -> AsyncGenerator[tuple[int, GenerateOutput], None]:
    """Items of all streams as they come, each with its stream's number. Raises what the first failing one raises."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    # One place: whoever cannot put its output here lets the engine gather more for it.
    ready: asyncio.Queue[tuple[int, GenerateOutput] | Exception | None] = asyncio.Queue(maxsize=1)

    async def forward(number: int, stream: AsyncGenerator[GenerateOutput, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                await ready.put((number, item))

    async def forward_all() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, stream in enumerate(streams):
                    tasks.create_task(forward(number, stream))
        except ExceptionGroup as group:
            await ready.put(group.exceptions[0])  # raised below
        else:
            await ready.put(None)

    producer = asyncio.create_task(forward_all())
    try:
        while (numbered := await ready.get()) is not None:
            if isinstance(numbered, Exception):
                raise numbered
            yield numbered
    finally:
        producer.cancel()
        await asyncio.wait({producer})


def new_id(prefix: str) -> str:
    """A random id for a response, such as `chatcmpl-0f...`."""
    return f"{prefix}-{uuid.uuid4().hex}"


def prompt_ids(request_id: str, count: int) -> list[str]:
    """Engine ids of the prompts of one HTTP request."""
    return [request_id] if count == 1 else [f"{request_id}-{number}" for number in range(count)]
