"""The engine in this process: for scripts, notebooks and offline batches, without a server."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from sglang_jax.config import EngineConfig
from sglang_jax.engine.arguments import engine_config, is_single, template_of
from sglang_jax.engine.batch import FLIGHTS_PER_ROW, Batch, BatchStream
from sglang_jax.engine.item_stream import BatchResult, Item, ItemStream, StreamLimits
from sglang_jax.engine.items import (
    ItemConverter,
    Prompt,
    RequestOptions,
    Sampling,
    chat_ids,
    complete_sampling,
    request_of,
)
from sglang_jax.engine.launch import launch_engine
from sglang_jax.engine.launch_replicated import launch_engines
from sglang_jax.engine.loop_thread import LoopThread
from sglang_jax.engine.pooling import (
    NO_SAMPLES,
    check_dimensions,
    classifier,
    embedder,
    finished_vector,
    pooled_numbers,
    probabilities,
)
from sglang_jax.engine.process import check_main
from sglang_jax.engine.session import Session
from sglang_jax.engine.types import EngineClient, GenerateInput, GenerateOutput, ModelInfo, TextTokenizer
from sglang_jax.engine.validation import new_session
from sglang_jax.errors import EngineDeadError, ParameterError, quote
from sglang_jax.sampling import GenerationDefaults, SamplingParams
from sglang_jax.sampling.wants import POOLED
from sglang_jax.scheduler.commands import CloseSession, FlushCache, GetState, StartProfile, StopProfile
from sglang_jax.scheduler.messages import Command, Result, SchedulerStats

DEFAULT_LOOKAHEAD = 1024
Launcher = Callable[[EngineConfig], Awaitable[EngineClient]]


async def _launch(config: EngineConfig) -> EngineClient:
    return await (launch_engine(config, in_process=True) if config.replicas == 1 else launch_engines(config))


class Engine:
    """A model, ready to generate.

    >>> with Engine(model_path="demo") as engine:
    ...     output = engine.generate("The capital of France is", SamplingParams(temperature=0))

    It may be used from any thread, in a script or with a running event loop (in a notebook). With `dp_size` above 1,
    its replicas are processes, so a script needs the guard `if __name__ == "__main__":` of `multiprocessing`. The
    engine ends at `shutdown`, at the end of a `with` block, when it is garbage-collected, or at exit.

    **Arguments:** `config`, or its fields by name (see `EngineConfig`), also by names of vLLM and SGLang
    (`sglang_jax.spellings`: `model`, `tensor_parallel_size`). `launch`: starts the engine core; for tests.

    **Raises:** `ConfigError` for invalid options, `CheckpointError` for a model that cannot be loaded.
    """

    def __init__(self, config: EngineConfig | None = None, *, launch: Launcher = _launch, **options: Any) -> None:
        self.config = engine_config(config, options)
        if self.config.replicas > 1:
            check_main()
        self._loop = LoopThread("sglang-jax-client")
        try:
            self._client = self._loop.run(_await_client(launch(self.config)))
        except BaseException:
            self._loop.close()
            raise
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, self._client)
        # With atexit, because it must run before the handlers that the backend registered on loading.
        self._finalizer.atexit = False
        atexit.register(self._finalizer)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer."""
        return self._client.tokenizer

    @property
    def model_info(self) -> ModelInfo:
        """The model's properties."""
        return self._client.model_info

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's current counters."""
        return self._client.stats

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises `ParameterError` for anything else."""
        if not isinstance(text, str):
            raise ParameterError(f"text must be a string, got {quote(text)}", param="text")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self,
        prompts: Prompt,
        sampling_params: Sampling | None = None,
        *,
        stream: Literal[False] = False,
        **request: Unpack[RequestOptions],
    ) -> GenerateOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        stream: Literal[False] = False,
        **request: Unpack[RequestOptions],
    ) -> list[GenerateOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        stream: Literal[True],
        **request: Unpack[RequestOptions],
    ) -> Iterator[GenerateOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        stream: bool = False,
        **request: Unpack[RequestOptions],
    ) -> GenerateOutput | list[GenerateOutput] | Iterator[GenerateOutput]:
        """Completes prompts.

        **Arguments:**

        - `prompts`: a text, or a list of token ids, or a list of either.
        - `sampling_params`: for all prompts, or a list with one per prompt. `SamplingParams` are used as they are; for
          fields that a dict leaves out, or without this argument, the model's defaults apply.
        - `stream`: return an iterator over the outputs as they grow. Each has all text so far and the new part, and
          `index`, its position in the list. Leaving the iteration aborts running requests.
        - `request`: further fields of `GenerateInput`, the same for all prompts.

        **Returns:** one output for one prompt; for a list, a list in the same order. Prompts with n > 1 have n outputs,
        one after the other in the list. A single prompt with n > 1 also gives a list, which its type does not say: to a
        type checker, give a list of that one prompt.

        **Raises:** the `RequestError` of the first request that fails; all others are aborted.
        """
        single, batch = self._batch(prompts, sampling_params, template_of(request, stream=stream))
        if stream:
            return self._loop.iterate(BatchStream(batch))
        outputs = self._loop.run(batch.run())
        return outputs[0] if single else outputs

    @overload
    def async_generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self,
        prompts: Prompt,
        sampling_params: Sampling | None = None,
        *,
        stream: Literal[False] = False,
        **request: Unpack[RequestOptions],
    ) -> Awaitable[GenerateOutput]: ...

    @overload
    def async_generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        stream: Literal[False] = False,
        **request: Unpack[RequestOptions],
    ) -> Awaitable[list[GenerateOutput]]: ...

    @overload
    def async_generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        stream: Literal[True],
        **request: Unpack[RequestOptions],
    ) -> AsyncGenerator[GenerateOutput, None]: ...

    def async_generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        stream: bool = False,
        **request: Unpack[RequestOptions],
    ) -> Awaitable[GenerateOutput | list[GenerateOutput]] | AsyncGenerator[GenerateOutput, None]:
        """`generate` for asyncio: await it, or use `async for` with `stream=True`. Cancelling aborts the requests."""
        single, batch = self._batch(prompts, sampling_params, template_of(request, stream=stream))
        if stream:
            return self._loop.iterate_async(BatchStream(batch))
        return self._wait_for(batch, single)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, normalize: bool | None = None
    ) -> NDArray[np.float32]:
        """Vectors of texts, by a model for that (`--model-task embed`).

        >>> with Engine(model_path="Qwen/Qwen3-Embedding-0.6B") as engine:
        ...     vectors = engine.embed(["a text", "another"])

        **Arguments:** `prompts`: a text, or a list of token ids, or a list of either; `dimensions`: the first numbers
        of each vector, for models trained for that; `normalize`: divide vectors by their length; by default as the
        checkpoint says.

        **Returns:** float32 `[width]` for one prompt, `[prompts, width]` for a list.

        **Raises:** `ParameterError` for a model that gives no vectors, and for `dimensions` that they do not have; the
        `RequestError` of the first prompt that fails.
        """
        pooler = embedder(self.model_info)
        check_dimensions(dimensions, self.model_info)
        single, found = self._pooled(prompts)
        vectors = [finished_vector(each, pooler, dimensions, normalize) for each in found]
        width = self.model_info.pooled_width if dimensions is None else dimensions
        return vectors[0] if single else np.array(vectors, np.float32).reshape(len(vectors), width)

    def classify(self, prompts: Prompt | Sequence[Prompt]) -> NDArray[np.float32]:
        """Probabilities of the labels of texts, by a model for that (`--model-task classify`), as its config makes them
        of scores.

        **Arguments:** `prompts`: a text, or a list of token ids, or a list of either.

        **Returns:** float32 `[labels]` for one prompt, `[prompts, labels]` for a list; `model_info.pooler.labels` has
        the names.

        **Raises:** `ParameterError` for a model without labels; the `RequestError` of the first prompt that fails.
        """
        pooler = classifier(self.model_info)
        single, found = self._pooled(prompts)
        scores = [probabilities(each, pooler.activation) for each in found]
        return scores[0] if single else np.array(scores, np.float32).reshape(len(scores), len(pooler.labels))

    def _pooled(self, prompts: Prompt | Sequence[Prompt]) -> tuple[bool, list[NDArray[np.float32]]]:
        """Whether there is one prompt, and the vectors or scores of all."""
        single, batch = self._batch(prompts, NO_SAMPLES, GenerateInput(prompt="", wants=POOLED))
        return single, [pooled_numbers(output) for output in self._loop.run(batch.run())]

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        sampling_params: Sampling | None = None,
        *,
        stream: Literal[False] = False,
        **request: Unpack[RequestOptions],
    ) -> GenerateOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        sampling_params: Sampling | None = None,
        *,
        stream: Literal[True],
        **request: Unpack[RequestOptions],
    ) -> Iterator[GenerateOutput]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        sampling_params: Sampling | None = None,
        *,
        stream: bool = False,
        **request: Unpack[RequestOptions],
    ) -> GenerateOutput | list[GenerateOutput] | Iterator[GenerateOutput]:
        """Answers a conversation, rendered by the model's chat template.

        >>> engine.chat([{"role": "user", "content": "What is the capital of France?"}]).text

        **Arguments:** `messages` in OpenAI's form, with `role` and `content`. All else is as for `generate`.
        """
        request.setdefault("continues_text", False)
        ids = chat_ids(self.tokenizer, messages)
        if stream:
            return self.generate(ids, sampling_params, stream=True, **request)
        return self.generate(ids, sampling_params, **request)

    def batch(
        self,
        items: Iterable[Item],
        sampling_params: Sampling | None = None,
        *,
        ordered: bool = False,
        reorder: bool = True,
        lookahead: int = DEFAULT_LOOKAHEAD,
        **request: Unpack[RequestOptions],
    ) -> Iterator[BatchResult]:
        """Completes any number of prompts, with a limited number of them in memory.

        >>> for result in engine.batch({"prompt": line, "max_new_tokens": 32} for line in open("prompts.txt")):
        ...     print(result.index, result.text)

        **Arguments:**

        - `items`: any iterable, read while results are consumed. An item is a prompt (text or token ids), or a mapping
          with `prompt` or `messages` and any fields of `SamplingParams` and of `request`; a `custom_id` is ignored.
        - `sampling_params`, `request`: for fields that an item leaves out; see `generate`.
        - `ordered`: return results in the order of the items; otherwise as they finish.
        - `reorder`: run prompts that share a prefix one after the other, so that they find it in the prefix cache.
        - `lookahead`: number of items to search for shared prefixes.

        **Returns:** an iterator over results, one per item. If an item is invalid or fails, its result has the `error`.
        Leaving the iteration aborts running requests.

        **Raises:** `ParameterError` for invalid arguments; during the iteration, what `items` raises, and
        `EngineDeadError` if the engine is lost.
        """
        self._check_open()
        if lookahead < 1:
            raise ParameterError(f"lookahead must be at least 1, got {lookahead}", param="lookahead")
        convert = ItemConverter(
            self.tokenizer,
            self.model_info.generation_defaults,
            sampling_params,
            template_of(request),
        )
        limits = StreamLimits(self._max_in_flight(), lookahead)
        stream = ItemStream(self._loop, self._client, convert, limits, ordered=ordered, reorder=reorder)
        return stream.run(items)

    def open_session(self, session_id: str | None = None, *, timeout: float | None = None) -> Session:
        """Opens a session: a conversation whose turns contain only the new part, and whose KV cache is kept between
        turns.

        **Arguments:** `session_id`: generated if None; `timeout`: seconds without a turn after which the session is
        closed, `session_timeout` if None.

        **Raises:** `SessionLimitError` while `max_sessions` are open; `ParameterError` for an id that is in use.
        """
        self._check_open()
        opened = self._call(new_session(session_id, timeout=timeout))
        return Session(opened, self._run_turn, lambda: self._close_session(opened))

    def flush_cache(self) -> bool:
        """Clears the prefix cache. Does nothing and returns False while requests are running or queued."""
        return self._call(FlushCache())

    def start_profile(self, folder: str | None = None, *, num_steps: int | None = None) -> list[str]:
        """Starts recording a profile for [JAX's](https://docs.jax.dev/en/latest/profiling.html) or
        [torch's](https://docs.pytorch.org/docs/stable/profiler.html) tools. Returns its folders, one per replica.

        **Arguments:** `folder`: `profile_dir` if None; `num_steps`: stop after this many steps; None: at
        `stop_profile`.

        **Raises:** `ParameterError` while a profile is being recorded, without a folder, or if it cannot be written.
        """
        self._check_open()
        place = folder or self.config.profile_dir
        if place is None:
            raise ParameterError("a profile needs a folder: give one, or Engine(profile_dir=...)")
        return self._call(StartProfile(place, num_steps))

    def stop_profile(self) -> list[str]:
        """Stops recording, and returns the folders once written. Raises `ParameterError` if there is no recording."""
        return self._call(StopProfile())

    def state(self) -> dict[str, object]:
        """The state of scheduler and runner; with replicas, `replicas` has a list with one per replica."""
        states = self._call(GetState())
        return states[0] if self.config.replicas == 1 else {"replicas": states}

    def shutdown(self) -> None:
        """Ends the engine; requests in flight fail with `EngineDeadError`. Further calls do nothing."""
        atexit.unregister(self._finalizer)
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run_turn(
        self, prompt: Prompt, sampling: Sampling | None, template: GenerateInput
    ) -> GenerateOutput | Iterator[GenerateOutput]:
        if not is_single(prompt):
            raise ParameterError(
                "a turn of a session must have one prompt, a text or a list of token ids; got several prompts or an "
                "empty list",
                param="prompt",
            )
        _, batch = self._batch(prompt, sampling, template)
        if template.stream:
            return self._loop.iterate(BatchStream(batch))
        return self._loop.run(batch.run())[0]

    def _close_session(self, session_id: str) -> None:
        if self._finalizer.alive:  # an engine that was shut down has no sessions
            self._call(CloseSession(session_id, ""))

    async def _wait_for(self, batch: Batch, single: bool) -> GenerateOutput | list[GenerateOutput]:
        outputs = await self._loop.run_async(batch.run())
        return outputs[0] if single else outputs

    def _call(self, command: Command[Result]) -> Result:
        self._check_open()
        return self._loop.run(self._client.call(command))

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise EngineDeadError("the engine was shut down")

    def _batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None,
        template: GenerateInput,
    ) -> tuple[bool, Batch]:
        """Returns whether the caller gets a single output, and the requests as a batch."""
        self._check_open()
        single = is_single(prompts)
        each: Sequence[Any] = [prompts] if single else prompts
        sampling = _sampling_of_each(sampling_params, len(each), self.model_info.generation_defaults)
        requests = [request_of(template, prompt, params) for prompt, params in zip(each, sampling, strict=True)]
        return single and requests[0].sampling.n == 1, Batch(self._client, requests, self._max_in_flight())

    def _max_in_flight(self) -> int:
        limit = FLIGHTS_PER_ROW * self._client.max_running_requests
        return limit if self.config.max_queued_requests is None else min(limit, self.config.max_queued_requests)


def _sampling_of_each(
    sampling: Sampling | Sequence[Sampling] | None, count: int, defaults: GenerationDefaults
) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, (SamplingParams, Mapping)):
        return [complete_sampling({} if sampling is None else sampling, defaults)] * count
    if len(sampling) != count:
        raise ParameterError(
            f"sampling_params must be one object, or a list with one per prompt: got {len(sampling)} for {count} "
            "prompts",
            param="sampling_params",
        )
    return [complete_sampling(params, defaults) for params in sampling]


async def _await_client(client: Awaitable[EngineClient]) -> EngineClient:
    return await client


def _shut_down(loop: LoopThread, client: EngineClient) -> None:
    if loop.is_current:  # collected on the loop's own thread, which cannot wait for itself
        threading.Thread(target=_shut_down, args=(loop, client), name="sglang-jax-shutdown").start()
        return
    loop.run(client.close())
    loop.close()
