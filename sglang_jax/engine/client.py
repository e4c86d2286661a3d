"""The front end: checks and tokenizes requests, converts tokens to text, and yields new output."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from sglang_jax.engine import validation
from sglang_jax.engine.detokenizer import HiddenStops, OutputText, SpecialNames
from sglang_jax.engine.link import Links, RoutedRequest
from sglang_jax.engine.output import Completion, RequestOutputs
from sglang_jax.engine.prompt_reader import PromptReader
from sglang_jax.engine.types import (
    FinishKind,
    FinishReason,
    GenerateInput,
    ModelInfo,
    OutputDelta,
    ReplicaLoad,
    TextTokenizer,
)
from sglang_jax.errors import EngineDeadError, ParameterError, QueueFullError, quote
from sglang_jax.sampling import SamplingParams
from sglang_jax.scheduler.messages import Command, Result, SchedulerStats


class AsyncEngineClient:
    """`EngineClient` over one or more links. All methods run on one event loop."""

    def __init__(self, links: Links, tokenizer: TextTokenizer) -> None:
        self.links = links
        self._tokenizer = tokenizer
        self._reader = PromptReader(tokenizer)
        self._special_names: SpecialNames | None = None
        self._requests: dict[str, RoutedRequest] = {}

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._tokenizer

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int,
        param: str = "prompt",
        tenant: str = "",
        flow: str = "",
    ) -> list[int]:
        return await self._reader.encode(
            text,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            param=param,
            tenant=tenant,
            flow=flow,
        )

    @property
    def model_info(self) -> ModelInfo:
        return self.links.model_info

    @property
    def max_running_requests(self) -> int:
        return self.links.max_running_requests

    @property
    def alive(self) -> bool:
        return self.links.alive

    @property
    def gone(self) -> bool:
        return self.links.gone

    @property
    def stats(self) -> SchedulerStats:
        return self.links.stats

    async def generate(self, request: GenerateInput) -> AsyncGenerator[OutputDelta, None]:
        """See `EngineClient.generate`. With replicas, also raises `ReplicaLostError`."""
        validation.check_input(request, self.model_info)
        routed = self._register(self.links.admit(request))
        try:
            await self._read_prompt(routed)
            while (link := await self.links.choose(routed)) is not None:
                outputs = self._outputs(routed.request)
                routed.link, routed.outputs = link, outputs
                partly_read = False
                try:
                    link.submit(outputs)
                    while deltas := await outputs.take():
                        if not partly_read:
                            self.links.check_first(deltas[0])
                            partly_read = True
                        deltas.reverse()
                        while deltas:  # no reference is kept while the reader is slow: a delta may be megabytes
                            yield deltas.pop()
                    return
                except (EngineDeadError, QueueFullError) as error:
                    self.links.failed(routed, error, partly_read=partly_read)
                finally:
                    routed.link = routed.outputs = None
                    link.release(outputs)
                    outputs.close()
                    self.links.leave(routed)
            for delta in _aborted(routed.request):
                yield delta
        finally:
            del self._requests[routed.request.request_id or ""]

    def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].abort()
            self.links.wake()

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    async def call(self, command: Command[Result]) -> Result:
        return await self.links.call(command, idle=not self._requests)

    def loads(self) -> list[ReplicaLoad]:
        return self.links.loads()

    async def drain(self, index: int | None = None, timeout: float | None = None) -> None:
        await self.links.drain(index, timeout)

    async def ended(self) -> str:
        return await self.links.ended()

    async def close(self, *, drain: bool = False) -> None:
        """See `EngineClient.close`. Refuses new requests from the call on; requests that it does not let finish fail
        with `EngineDeadError`. A second call without `drain` cuts a drain short."""
        await self.links.close(drain=drain)
        self._reader.close()

    def _register(self, request: GenerateInput) -> RoutedRequest:
        request_id = uuid.uuid4().hex if request.request_id is None else request.request_id
        if request_id in self._requests:
            raise ParameterError(
                f"request_id {quote(request_id)} belongs to a request that is still running", param="request_id"
            )
        routed = self._requests[request_id] = RoutedRequest(replace(request, request_id=request_id))
        return routed

    async def _read_prompt(self, routed: RoutedRequest) -> None:
        prompt = await self._reader.token_ids(routed.request, self.model_info)
        session = routed.request.session
        if session is not None and session.opening is None:
            session = replace(session, opening=self._reader.opening)
        routed.request = replace(routed.request, prompt=prompt, session=session)

    def _outputs(self, request: GenerateInput) -> RequestOutputs:
        outputs = RequestOutputs(request)
        outputs.completions = [self._completion(outputs, index) for index in range(request.sampling.n)]
        return outputs

    def _completion(self, outputs: RequestOutputs, index: int) -> Completion:
        request = outputs.request
        sampling = request.sampling
        text = OutputText(
            self._tokenizer.stream_decoder(
                sampling.skip_special_tokens, continues_text=request.continues_text, markers=request.markers
            ),
            sampling.stop,
            validation.stop_token_ids(sampling, self.model_info),
            include_stop=sampling.include_stop,
            markers=request.markers,
            unsearched=sampling.min_new_tokens,
            hidden=self._hidden_stops(sampling),
        )
        return Completion(outputs, index=index, prompt_tokens=len(request.prompt), text=text)

    def _hidden_stops(self, sampling: SamplingParams) -> HiddenStops:
        """The special tokens that stop strings name, if their text is hidden."""
        if not sampling.stop or not sampling.skip_special_tokens:
            return HiddenStops()
        if self._special_names is None:
            self._special_names = SpecialNames(self._tokenizer.special_tokens)
        return self._special_names.hidden_in(sampling.stop)


def _aborted(request: GenerateInput) -> Sequence[OutputDelta]:
    return [
        OutputDelta(
            index=index,
            text="",
            token_ids=[],
            prompt_tokens=len(request.prompt),
            completion_tokens=0,
            cached_tokens=0,
            finish=FinishReason(FinishKind.ABORT),
        )
        for index in range(request.sampling.n)
    ]
