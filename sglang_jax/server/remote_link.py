"""Another server as a replica of this one, over its native routes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import msgspec

from sglang_jax.engine.output import RequestOutputs
from sglang_jax.engine.types import ModelInfo, TextTokenizer
from sglang_jax.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from sglang_jax.scheduler.commands import SessionCommand
from sglang_jax.scheduler.messages import Command, Result, SchedulerStats
from sglang_jax.server.control import REMOTE_CALLS, RemoteCall
from sglang_jax.server.remote_format import (
    add_answer,
    event_of,
    request_body,
    request_headers,
    tenant_headers,
)
from sglang_jax.server.sampling import rename_field
from sglang_jax.server.tracing import trace_headers

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""Timeout of connecting, and of requests that do not use the model."""

HEALTH_SECONDS = 1.0
"""Seconds between two polls of a server's health and load."""

MISSED_POLLS = 3
"""Polls in a row without an answer after which a server is considered lost."""

PROBE = "The quick brown fox jumps: 12.50 €, Übergröße, 東京\n\n  def f(x): return x"
"""Text that different models' tokenizers split differently."""

ENDED_CODES = frozenset({"shutting_down", "engine_dead", "unavailable"})
"""Codes of errors that mean that the server, not only the request, has ended."""

INVALID = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Raised by reading an answer in another form."""

_NATIVE_NAMES = {"rid": "request_id", "input_ids": "prompt"}
"""Names of fields on the native route, and the engine's names."""


Part = TypeVar("Part")


class RemoteLink:
    """A `Link` to a server on another machine. Created by `connect`; all methods run on one event loop. The server
    sends text as well as tokens, because it decodes them anyway to find stop strings. A request that does not stream
    gets its answer in one piece, so if the connection breaks before, it is unknown whether the request was started."""

    def __init__(self, address: str, http: httpx2.AsyncClient, model_info: ModelInfo) -> None:
        self.address = address
        self._http = http
        self._model_info = model_info
        self._stats = SchedulerStats()
        self._rows = 0
        self._tokens = 0
        self._in_flight = 0
        self._external_load = 0
        self._silent_seconds = 0.0
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watch: asyncio.Task[None] | None = None
        self._runs: dict[RequestOutputs, _Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()

    @classmethod
    async def connect(cls, address: str, tokenizer: TextTokenizer, api_key: str | None) -> RemoteLink:
        """Connects to the server at HOST:PORT. Raises `EngineDeadError` if it does not answer or does not serve;
        `ConfigError` if its model has another tokenizer."""
        http = httpx2.AsyncClient(
            base_url=f"http://{address}",
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )
        try:
            await _ask(http, "/health")
            info = _read(await _ask(http, "/model_info"), ModelInfo)
            await _check_tokenizer(http, address, tokenizer)
            link = cls(address, http, info)
            await link._poll()
        except BaseException:
            await http.aclose()
            raise
        link._watch = asyncio.create_task(link._keep_polling(), name=f"watch-{address}")
        return link

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    @property
    def max_running_requests(self) -> int:
        return self._rows

    @property
    def max_total_tokens(self) -> int:
        return self._tokens

    @property
    def external_load(self) -> int:
        return self._external_load

    @property
    def alive(self) -> bool:
        return not self._over.done()

    @property
    def silent_seconds(self) -> float:
        return self._silent_seconds

    @property
    def stats(self) -> SchedulerStats:
        """The server's load at the last poll."""
        return self._stats

    def submit(self, outputs: RequestOutputs) -> None:
        if not self.alive:
            raise EngineDeadError(f"{self.address} is lost: {self._over.result()}")
        self._in_flight += outputs.request.sampling.n
        name = f"{self._name}-{next(self._numbers)}"
        self._runs[outputs] = _Run(name, self._start(self._run(outputs, name)))

    def abort(self, outputs: RequestOutputs) -> None:
        run = self._runs.get(outputs)
        if run is not None:
            self._start(self._abort(run.name))

    def release(self, outputs: RequestOutputs) -> None:
        """See `Link.release`. Closes the connection, which ends the request there."""
        run = self._runs.pop(outputs, None)
        if run is not None:
            run.task.cancel()
            self._in_flight -= outputs.request.sampling.n

    async def call(self, command: Command[Result]) -> Result:
        """See `Link.call`. A profile is written to that server's own folder."""
        remote: RemoteCall[Any, Result] = REMOTE_CALLS[type(command)]
        headers = tenant_headers(command.owner) if isinstance(command, SessionCommand) else {}
        timeout = httpx2.Timeout(remote.seconds or CONNECT_SECONDS, connect=CONNECT_SECONDS)
        request = asyncio.create_task(
            self._http.request(remote.method, remote.path, json=remote.body(command), headers=headers, timeout=timeout)
        )
        try:
            either: list[asyncio.Future[Any]] = [request, self._over]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise EngineDeadError(f"{self.address}: {self._over.result()}")
            response = request.result()
        except httpx2.RequestError as error:
            raise EngineDeadError(f"{self.address} does not answer: {type(error).__name__} {error}") from error
        finally:
            request.cancel()
        if response.status_code == 200:
            try:
                return remote.read(response.json(), self.address)
            except INVALID as error:
                raise self._unread(error) from error
        if remote.otherwise is not None:
            return remote.otherwise
        raise self._error(response)

    async def ended(self) -> str:
        return await asyncio.shield(self._over)

    async def close(self, *, drain: bool = False) -> None:
        """Disconnects from the server, which keeps running. Its requests end with their connections."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        self._lose("it was released")
        for outputs in list(self._runs):
            outputs.fail(EngineDeadError(f"{self.address} was released", started=outputs.started or None))
            self.release(outputs)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, outputs: RequestOutputs, name: str) -> None:
        """Sends the request and fills the outputs. Errors go there, because nothing awaits this task."""
        try:
            await self._ask(outputs, name)
        except httpx2.ConnectError as error:
            self._lose(f"cannot connect: {error}")
            outputs.fail(EngineDeadError(f"cannot connect to {self.address}: {error}"))
        except httpx2.RequestError as error:
            broke = f"the connection to {self.address} broke: {type(error).__name__} {error}"
            outputs.fail(EngineDeadError(broke, started=outputs.started or None))
        except RequestError as error:
            rename_field(error, _NATIVE_NAMES)
            outputs.fail(error)
        except Exception as error:  # an invalid answer
            logger.exception("%s sent an invalid response", self.address)
            outputs.fail(self._unread(error))

    async def _ask(self, outputs: RequestOutputs, name: str) -> None:
        request = outputs.request
        body = request_body(request, name, self._model_info.context_length)
        headers = request_headers(request) | trace_headers()
        if not outputs.stream:
            response = await self._http.post("/generate", json=body, headers=headers)
            if response.status_code != 200:
                raise self._error(response)
            answer = response.json()
            for number, one in enumerate(answer if isinstance(answer, list) else [answer]):
                add_answer(outputs, {"index": number, **one}, first=True)
            return
        begun: set[int] = set()
        async with self._http.stream("POST", "/generate", json=body, headers=headers) as response:
            if response.status_code != 200:
                await response.aread()
                raise self._error(response)
            async for line in response.aiter_lines():
                if (event := event_of(line)) is None:
                    continue
                if "error" in event:
                    raise self._error_of(event["error"], 500)
                index = add_answer(outputs, event, first=int(event.get("index", 0)) not in begun)
                begun.add(index)
        if any(completion.finish is None for completion in outputs.completions):
            raise httpx2.RemoteProtocolError("the stream ended before its last event")

    def _unread(self, error: Exception) -> RequestError:
        unread = RequestError(f"{self.address} sent an invalid response: {type(error).__name__} {error}")
        unread.status = 500
        return unread

    def _error(self, response: httpx2.Response) -> RequestError:
        try:
            error = response.json()["error"]
        except INVALID:
            error = f"{self.address} returned status {response.status_code}: {response.text[:200]}"
        return self._error_of(error, response.status_code)

    def _error_of(self, error: object, status: int) -> RequestError:
        fields: Mapping[str, Any] = error if isinstance(error, Mapping) else {"message": error}
        code, message = fields.get("code"), str(fields.get("message"))
        if code in ENDED_CODES:
            # Another may run a request that a draining server has not finished. It may have killed a dead engine.
            if code != "engine_dead":
                self._lose(message)
            return EngineDeadError(f"{self.address}: {message}", started=None if code == "engine_dead" else False)
        if code == QueueFullError.code:
            return QueueFullError(message)
        raised = RequestError(message, param=fields.get("param"), code=code)
        raised.status = status
        return raised

    async def _abort(self, request_id: str) -> None:
        try:
            await self._http.post("/abort_request", json={"rid": request_id}, timeout=CONNECT_SECONDS)
        except httpx2.RequestError as error:
            logger.warning("Could not send the abort of a request to %s: %s", self.address, error)

    async def _keep_polling(self) -> None:
        missed = 0
        while self.alive:
            await asyncio.sleep(HEALTH_SECONDS)
            try:
                await self._poll()
                missed = 0
            except EngineDeadError as error:
                missed += 1
                if error.started is False or missed == MISSED_POLLS:
                    self._lose(error.message)

    async def _poll(self) -> None:
        mine = self._in_flight
        await _ask(self._http, "/health")
        answer = _read(await _ask(self._http, "/v1/loads"), _Loads)
        loads = [load for load in answer.loads if load.state in ("serving", "draining")]
        self._rows = sum(load.max_running_requests for load in loads)
        self._tokens = sum(load.max_total_num_tokens for load in loads)
        self._silent_seconds = max((load.silent_seconds for load in loads), default=0.0)
        self._stats = SchedulerStats(
            num_running=sum(load.num_running_reqs for load in loads),
            num_waiting=sum(load.num_waiting_reqs for load in loads),
            num_used_tokens=sum(load.num_used_tokens for load in loads),
            max_total_tokens=self._tokens,
            gen_throughput=sum(load.gen_throughput for load in loads),
            programs_left=sum(load.programs_left for load in loads),
            weight_version=_version(loads, self._model_info.weight_version),
        )
        self._external_load = max(self._stats.num_running + self._stats.num_waiting - mine, 0)

    def _lose(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)


class _Load(msgspec.Struct):
    """What is read of a replica's load; see `Load` of `/v1/loads`. Older servers do not tell fields with a default."""

    state: str
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    gen_throughput: float
    silent_seconds: float = 0.0
    programs_left: int = 0
    weight_version: str | None = None


class _Loads(msgspec.Struct):
    loads: list[_Load]


class _Tokens(msgspec.Struct):
    tokens: list[int]


def _version(loads: Sequence[_Load], otherwise: str) -> str:
    """The version of the weights of all replicas of a server, empty if they differ. `otherwise`: that of an older
    server, which does not tell it."""
    versions = {otherwise if load.weight_version is None else load.weight_version for load in loads}
    return "" if len(versions) > 1 else next(iter(versions), otherwise)


async def _ask(http: httpx2.AsyncClient, path: str, body: Mapping[str, str] | None = None) -> httpx2.Response:
    """Returns the answer to GET, or to POST with a `body`. Raises `EngineDeadError`, `started` False for an error
    answer, None for no answer."""
    try:
        method = "GET" if body is None else "POST"
        response = await http.request(method, path, json=body, timeout=CONNECT_SECONDS)
    except httpx2.RequestError as error:
        raise EngineDeadError(
            f"{http.base_url.netloc.decode()} does not answer: {type(error).__name__} {error}", started=None
        ) from error
    if response.status_code != 200:
        raise EngineDeadError(
            f"{http.base_url.netloc.decode()} returned status {response.status_code} for {path}: {response.text[:200]}"
        )
    return response


def _read(response: httpx2.Response, kind: type[Part]) -> Part:
    """Returns an answer's JSON. Raises `EngineDeadError`, `started` None, if something else answers at the address."""
    try:
        return msgspec.json.decode(response.content, type=kind, strict=False)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise EngineDeadError(f"{response.url} sent an invalid response: {error}", started=None) from error


async def _check_tokenizer(http: httpx2.AsyncClient, address: str, tokenizer: TextTokenizer) -> None:
    theirs = _read(await _ask(http, "/tokenize", {"prompt": PROBE}), _Tokens).tokens
    if theirs != tokenizer.encode(PROBE):
        raise ConfigError(
            f"{address} tokenizes text differently: --model-path or --tokenizer-path must name the model that this "
            "server serves"
        )


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    task: asyncio.Task[None]
