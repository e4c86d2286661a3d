"""The front end: checks and tokenizes requests, converts tokens to text, and yields new output."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence

from sglang_jax.engine import validation
from sglang_jax.engine.detokenizer import HiddenStops, OutputText, SpecialNames
from sglang_jax.engine.link import Links, RoutedRequest
from sglang_jax.engine.output import Completion, RequestOutputs
from sglang_jax.engine.prompt_reader import PromptReader
from sglang_jax.engine.types import (
    SCRIPT,
    FinishKind,
    FinishReason,
    GenerateInput,
    ModelInfo,
    Origin,
    OutputDelta,
    ReplicaLoad,
    TextTokenizer,
    TokenizedRequest,
)
from sglang_jax.errors import EngineDeadError, ParameterError, QueueFullError, quote
from sglang_jax.sampling import SamplingParams
from sglang_jax.scheduler.messages import Command, Result, SchedulerStats, SessionTurn


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
        self, text: str, origin: Origin, *, add_special_tokens: bool, max_tokens: int, param: str
    ) -> list[int]:
        return await self._reader.encode(
            text,
            origin,
            self.model_info.context_length,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            param=param,
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

    async def generate(self, request: GenerateInput, origin: Origin = SCRIPT) -> AsyncGenerator[OutputDelta, None]:
        """See `EngineClient.generate`. With replicas, also raises `ReplicaLostError`."""
        validation.check_input(request, self.model_info)
        sampling = self.links.admit(request.sampling)
        request_id, routed = self._register(request.request_id)
        try:
            routed.request = await self._tokenized(request, request_id, sampling, origin)
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
            del self._requests[request_id]

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

    def _register(self, chosen: str | None) -> tuple[str, RoutedRequest]:
        """Returns the id of a request, generated if the client chose none, and its state. Raises `ParameterError`."""
        request_id = uuid.uuid4().hex if chosen is None else chosen
        if request_id in self._requests:
            raise ParameterError(
                f"request_id {quote(request_id)} belongs to a request that is still running", param="request_id"
            )
        routed = self._requests[request_id] = RoutedRequest()
        return request_id, routed

    async def _tokenized(
        self, request: GenerateInput, request_id: str, sampling: SamplingParams, origin: Origin
    ) -> TokenizedRequest:
        token_ids = await self._reader.token_ids(request, origin, request_id, self.model_info)
        turn, session = request.session, None
        if turn is not None:
            opening = self._reader.opening if turn.opening is None else turn.opening
            name = turn.name or request_id
            session = SessionTurn(turn.session_id, origin.tenant, name, turn.after, opening, turn.whole)
        namespace = origin.namespace(request.extra_key)
        return TokenizedRequest(request, request_id, token_ids, sampling, origin, namespace, session)

    def _outputs(self, request: TokenizedRequest) -> RequestOutputs:
        outputs = RequestOutputs(request)
        outputs.completions = [self._completion(outputs, index) for index in range(request.sampling.n)]
        return outputs

    def _completion(self, outputs: RequestOutputs, index: int) -> Completion:
        request, sampling = outputs.request.input, outputs.request.sampling
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
        return Completion(outputs, index=index, prompt_tokens=len(outputs.request.token_ids), text=text)

    def _hidden_stops(self, sampling: SamplingParams) -> HiddenStops:
        """The special tokens that stop strings name, if their text is hidden."""
        if not sampling.stop or not sampling.skip_special_tokens:
            return HiddenStops()
        if self._special_names is None:
            self._special_names = SpecialNames(self._tokenizer.special_tokens)
        return self._special_names.hidden_in(sampling.stop)


def _aborted(request: TokenizedRequest) -> Sequence[OutputDelta]:
    return [
        OutputDelta(
            index=index,
            text="",
            token_ids=[],
            prompt_tokens=len(request.token_ids),
            completion_tokens=0,
            cached_tokens=0,
            finish=FinishReason(FinishKind.ABORT),
        )
        for index in range(request.sampling.n)
    ]
